"""What an image is asked for: the options of a call, and the bodies of requests, which have LoRAs and pictures by id."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from serve_app.client.errors import Forbidden
from serve_app.client.lora_calls import find_lora
from serve_app.client.pictures import Picture, picture_id
from serve_app.client.protocol import Operation, Service, without_none
from serve_app.client.records import Record

_LORA_ID = re.compile(r"model_[a-z2-7]{26}")

Loras = Mapping[str, float | None] | str
"""LoRAs by name or id with their weights (None is the service's default), or one LoRA that takes `lora_weight`."""


class JobOptions(TypedDict, total=False):
    """Options of every job: those left out, and None, take the service's defaults."""

    output_format: Literal["png", "jpeg", "webp"] | None
    priority: Literal["normal", "low"] | None
    """`low` waits behind all other jobs of the account."""
    start_within: int | None
    """A job that no worker has started after this many seconds ends as expired."""
    metadata: dict[str, str] | None
    """Texts that the job keeps."""
    webhook_url: str | None
    """An HTTPS address that the service tells when the job ends."""


class GenerationOptions(JobOptions, total=False):
    """Options of `generate`: those left out, and None, are as the LoRAs, or else their base model, say."""

    lora_weight: float | None
    """The weight of the one LoRA that is given without its own."""
    base_model: str | None
    negative_prompt: str | None
    sampler: str | None
    steps: int | None
    guidance_scale: float | None
    guidance_start: float | None
    """The fraction of an image's own steps at which guidance begins; a step without it takes half the time."""
    guidance_end: float | None
    width: int | None
    height: int | None
    num_images: int | None
    seed: int | None
    prompt_weights: bool | None
    """Whether `(red:1.5)` and `[green]` in both prompts weight their words."""
    embed_settings: bool | None
    """Whether each file holds what it was drawn with, as A1111 and InvokeAI read it."""
    image_id: str | None
    """An image of the account to begin from; `strength` is how much of it is redrawn."""
    strength: float | None
    mask_image_id: str | None
    """An image of the account: white where `image_id` is redrawn, black where it is kept."""


def given_options(call: str, known: type[JobOptions], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given. Raises `TypeError` for one that the call does not know."""
    for option in options.keys() - known.__annotations__.keys():
        raise TypeError(f"{call}() got an unexpected keyword argument {option!r}")
    return without_none(options)


def rows_of_lists(**given: Any) -> list[tuple[Any, ...]]:
    """Return the n-th of each list together; what is no list counts for all. Raises `ValueError` for other lengths."""
    lists = {name: [*each] for name, each in given.items() if each is not None and not isinstance(each, Mapping | str)}
    counts = {len(values) for values in lists.values()} or {1}
    if len(counts) > 1:
        found = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
        raise ValueError(f"{found}: give lists of one length, or one value for all without a list")
    (count,) = counts
    return [*zip(*(lists.get(name, [each] * count) for name, each in given.items()), strict=True)]


class Bodies:
    """Makes the bodies of requests, and remembers the ids of the LoRAs that they name."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lora_ids: dict[str, str] = {}

    def generation(
        self, prompt: str, loras: Loras | Sequence[str] | None, options: Mapping[str, Any], lora_id: str | None = None
    ) -> Operation[dict[str, Any]]:
        """Return the body that asks for a generation; a wrong option is refused before a name is looked up."""
        if loras is not None and lora_id is not None:
            raise TypeError("generate() takes either loras or lora_id")
        if not isinstance(loras, Mapping | str | None):  # `map` takes lists with one for each job
            raise TypeError(f"loras: must be a name, or {{name: weight}}, not {loras!r}")
        fields = given_options("generate", GenerationOptions, options)
        one, weight = loras if lora_id is None else lora_id, fields.pop("lora_weight", None)
        weights: Mapping[str, float | None] = {one: weight} if isinstance(one, str) else one or {}
        if weight is not None and not isinstance(one, str):
            raise TypeError("lora_weight: is for one LoRA that has no weight of its own")
        uses: list[dict[str, Any]] = []
        for name, each in weights.items():
            known_id = name if name == lora_id or _LORA_ID.fullmatch(name) else (yield from self._lora_id(name))
            uses.append(without_none({"id": known_id, "weight": each}))
        return {"prompt": prompt, "loras": uses, **fields}

    def pictures(
        self, given: Mapping[str, Any], image: Picture | None, mask: Picture | None
    ) -> Operation[dict[str, str]]:
        """Return the ids of what is begun from and masked by, as fields; `given` are the other fields."""
        ids: dict[str, str] = {}
        for name, field, picture in (("image", "image_id", image), ("mask", "mask_image_id", mask)):
            if picture is not None and given.get(field) is not None:
                raise TypeError(f"generate() takes either {name} or {field}")
            if picture is not None:
                ids[field] = yield from picture_id(self._service, picture)
        return ids

    def _lora_id(self, name: str) -> Operation[str]:
        if name not in self._lora_ids:
            self._lora_ids[name] = (yield from find_lora(self._service, name)).id
        return self._lora_ids[name]

    def create(self, body: dict[str, Any], idempotency_key: str | None = None) -> Operation[Record]:
        """Create the job that a body asks for."""
        try:
            return (yield from self._service.create(idempotency_key, body))
        except Forbidden:
            self._lora_ids.clear()  # another LoRA may have the name by now
            raise
