"""Base models and LoRA adapters on offer, as data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from serve_app.domain.digests import NO_DIGESTS, Digests
from serve_app.domain.families import family_of
from serve_app.domain.jobs import DEFAULT_GROUP, pool_of

FP8 = "fp8"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A base model: a diffusers folder, or a safetensors file and the folder that describes it."""

    id: str
    source: str
    config: str = ""
    """A single file names a diffusers folder of the same architecture, whose weights are not read. A folder leaves this
    empty."""
    vae: str = ""
    """Another VAE: a diffusers folder or a safetensors file; empty means the base model's own."""
    sampler: str = ""
    """The sampler of its images; empty means the engine's option, or else the base model's own."""
    passes: int = 1
    """How often a step of `sampler` asks the denoiser: the work of a job is multiplied by it."""
    steps: int | None = None
    """How many steps it was made for; None where nobody says it."""
    guidance: float | None = None
    """The guidance it was made for, 1 being none; None where nobody says it."""
    guidance_start: float | None = None
    guidance_end: float | None = None
    """The fractions of its own steps between which an image has guidance; None in both is in all."""
    clip_skip: int = 0
    """How many of the text encoders' last layers a prompt leaves out, as diffusers counts them."""
    text_encoder: str = ""
    """Another text encoder's folder, for a base model whose file holds none; empty means the base model's own."""
    tokenizer: str = ""
    """Another tokenizer's folder; empty means the base model's own."""
    precision: str = ""
    """`fp8` computes its large products in float8; empty means the generators' number type."""
    group: str = DEFAULT_GROUP
    """The group of generators that load it."""
    pipeline: str = ""
    """The class of diffusers' pipeline that it is of; empty where the machine that applied the catalog cannot tell."""
    max_side: int | None = None
    """Its images are at most this many pixels wide and high; None means what is usual for its pipeline."""
    widths: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The sizes of its denoiser's and text encoders' layers, as `unet.cross_attention_dim`; empty where the machine that
    applied the catalog cannot tell."""

    @property
    def pool(self) -> str:
        """Return the pool in which its jobs wait."""
        return pool_of(self.group)

    def why_not_for(self, own: "BaseModel") -> str:
        """Return why a LoRA of the base model `own` cannot be drawn on this one; '' where it can.

        It can where both are of one family and no width is another. What only one of the two configurations says is no
        difference: older ones leave out what their library had no name for.
        """
        if own.id == self.id:
            return ""
        families = family_of(own.pipeline), family_of(self.pipeline)
        for model, family in zip((own, self), families, strict=True):
            if not family or not model.widths:
                return f"the family and widths of {model.id} cannot be read here"
        if families[0] != families[1]:
            return f"{own.id} is of the family {families[0]}, and {self.id} of {families[1]}"
        for name, width in self.widths.items():
            if own.widths.get(name, width) != width:
                return f"{name} is {own.widths[name]} in {own.id}, and {width} in {self.id}"
        return ""


def bases_of_loras(base_models: Sequence[BaseModel]) -> Mapping[str, Sequence[str]]:
    """Return the ids of the base models that the LoRAs of each can be drawn on, by its id, which comes first."""
    return {
        own.id: [own.id, *(each.id for each in base_models if each is not own and not each.why_not_for(own))]
        for own in base_models
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter: `lora_id` of variant A, `model_id` of variant B.

    `file` is a URI of a safetensors file, or of a folder as PEFT saves one; `sha256` (hex) is the identity of its
    weights; `accounts` names who may use it, and None means everyone. An adapter with an `owner` (an account's id) is
    that account's, one without is the operator's.
    """

    id: str
    name: str
    description: str
    created_at: datetime
    file: str
    sha256: str
    base_model: str
    accounts: frozenset[str] | None = None
    is_folder: bool = False
    owner: str = ""
    size_bytes: int = 0
    """The size of its weights in storage; 0 for a row of the catalog file, whose files are the operator's."""
    trigger_words: tuple[str, ...] = ()
    """Its owner says that a prompt should hold these for it to act."""
    found: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts that validation saw in the file; empty for a row of the catalog file."""
    sampler: str = ""
    """The sampler of its images; empty means that of its base model."""
    steps: int | None = None
    """How many steps it was made for; None means what its base model says."""
    guidance: float | None = None
    """The guidance it was made for, 1 being none; None means what its base model says."""
    guidance_start: float | None = None
    guidance_end: float | None = None
    """The fractions of its own steps between which an image has guidance; None twice means what its base model says."""

    def holds(self, words: str) -> bool:
        """Return whether its name, description, trigger words or id hold every word of a search."""
        text = " ".join((self.name, self.description, *self.trigger_words, self.id)).casefold()
        return all(word in text for word in words.casefold().split())

    def recommended(self, base_models: Iterable[BaseModel]) -> "Recommended":
        """Return what it says of steps and guidance, or else what its base model does."""
        base = next((model for model in base_models if model.id == self.base_model), None)
        steps, guidance = (None, None) if base is None else (base.steps, base.guidance)
        return Recommended(self.steps or steps, self.guidance or guidance)


class Recommended(NamedTuple):
    """What images of a LoRA look best with. It is shown, and changes no request; None means that nobody says it."""

    steps: int | None = None
    guidance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an account that registers a LoRA by itself is held to."""

    max_loras: int
    max_bytes: int
    idempotency_key: str | None = None
    body: Digests = NO_DIGESTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What an account says of a LoRA that it registers."""

    name: str
    base_model: str
    description: str = ""
    trigger_words: tuple[str, ...] = ()
