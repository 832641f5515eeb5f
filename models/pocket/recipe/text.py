"""The tokenizer of the captions' language, and a first training of the text encoder without pictures.

The text encoder first learns to answer what a caption says (colors, shapes, places). The UNet then finds these facts
in the embeddings from its first step, and needs far fewer steps to follow the text.
"""

import copy
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from .captions import caption
from .plan import WORK, Plan
from .scenes import (
    COLORS,
    LANDSCAPES,
    PARTS,
    PLACES_OF_PARTS,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    training_scene,
)
from .styles import STYLES
from .training import Checkpoint, Progress, half_precision, pick_device, warm_then_cosine

MAX_TOKENS = 32
WIDTH = 128
CLIP_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
EXTRA_WORDS = ["photo", "painting", "style", *STYLES, "bright", "dark", "gray", "brown"]
SHARPNESS = 24.0
"""The answers' scores are cosines times this: thirty facts at once can have a cosine of 0.18 with their directions, and
so a score of 4.4."""
KEEPING = 10.0
"""What a squared change of what the adopted text said counts: the adopted UNet knows it by that."""
DEFAULT_POSITION = "center"
"""An object whose place is not stated is here."""
FACT_TOKENS = 12
"""So many of the last tokens say what a caption says as a whole; no caption of one object reaches as far."""
ABSENT = "(absent)"
UNASKED = -100
ANSWERS_AT_A_PLACE: dict[str, tuple[str, ...]] = {
    "color": (ABSENT, *COLORS),
    "shape": (ABSENT, *SHAPES),
    "size": (ABSENT, *SIZES),
    "part": (ABSENT, *PARTS),
}
ANSWERS: dict[str, tuple[str, ...]] = {
    "background": (ABSENT, *COLORS),
    "landscape": (ABSENT, *LANDSCAPES),
    "relation": (ABSENT, *RELATIONS, "and"),
    "position": (ABSENT, *POSITIONS),
    **{f"shape {i}": (ABSENT, *SHAPES) for i in (1, 2)},
    **{f"size {i}": (ABSENT, *SIZES) for i in (1, 2)},
    **{f"color {i}": (ABSENT, *COLORS) for i in (1, 2, 3)},
    **{f"color of {part}": tuple(COLORS) for part in PARTS},
    **{f"{what} at {place}": answers for place in POSITIONS for what, answers in ANSWERS_AT_A_PLACE.items()},
}
PLACES_OF_TWO = {
    "left of": ("left", "right"),
    "above": ("top", "bottom"),
    "right of": ("right", "left"),
    "below": ("bottom", "top"),
}
"""Where the first and the second object are; without a relation as for "left of"."""


def train_tokenizer(folder: Path = WORK / "tokenizer", seed: int = 20) -> None:
    """Byte-level BPE as CLIP has it; every word of the captions' language becomes one token."""
    rng = random.Random(seed)
    language = [caption(training_scene(rng), rng) for _ in range(20000)] + EXTRA_WORDS * 5
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        initial_alphabet=alphabet,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(language, trainer)
    learned = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    symbols = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*symbols, "<|startoftext|>", "<|endoftext|>"]))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, indent=0))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")
    CLIPTokenizer.from_pretrained(folder, model_max_length=MAX_TOKENS).save_pretrained(folder)


def load_tokenizer(folder: Path = WORK / "tokenizer") -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(folder)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokens_of(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return token ids padded as the Stable Diffusion pipeline pads them: (len(captions), MAX_TOKENS)."""
    encoded = tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    return encoded.input_ids


def train_text_encoder(plan: Plan) -> None:
    """Train the text encoder, from nothing or from the adopted one.

    The adopted encoder goes on saying what it said, and where no place is stated what it said of the default one. Once
    it has a reader it is over: the UNet goes on with that very reader.
    """
    from .unet import build_unet

    device = pick_device(plan.threads)
    torch.manual_seed(plan.seed)
    checkpoint = Checkpoint("text")
    adopted = checkpoint.load()
    if adopted is not None and "reader" in adopted:
        return
    if adopted is None:
        train_tokenizer(seed=plan.seed)
    tokenizer = load_tokenizer()
    encoder, pooling = build_text_encoder(tokenizer).to(device), build_unet().add_embedding.to(device)
    if adopted is not None:
        encoder.load_state_dict(adopted["encoder"])
        pooling.load_state_dict(adopted["pooling"])
    reader = FactReader(pooling.proj.out_features).to(device)
    before = SaidBefore(encoder, pooling) if adopted is not None else None
    parameters = [*encoder.parameters(), *pooling.parameters(), *reader.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=plan.text_rate, betas=(0.9, 0.98), weight_decay=0.01)
    progress = Progress("text", plan.text_steps)
    rng = random.Random(f"{plan.seed} text")
    for step in range(plan.text_steps):
        for group in optimizer.param_groups:
            group["lr"] = warm_then_cosine(step, plan.text_steps, plan.text_rate)
        scenes = [training_scene(rng) for _ in range(plan.text_batch)]
        seeds = [rng.random() for _ in scenes]
        tokens = tokens_of(tokenizer, _captions(scenes, seeds)).to(device)
        placed = tokens_of(tokenizer, _captions(map(with_stated_place, scenes), seeds)).to(device)
        hidden, pooled = embed(encoder, pooling, tokens)
        changed: float | Tensor = 0.0
        if before is not None:
            changed = before.change(tokens, placed, hidden, pooled)
            if step < plan.text_steps // 4:
                # the reader first learns how the adopted text says it
                hidden, pooled = hidden.detach(), pooled.detach()
        loss = reader.loss(pooled[:-1], hidden[:-1], scenes) + KEEPING * changed
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress.report(step, loss.item())
    checkpoint.save(encoder=encoder.state_dict(), pooling=pooling.state_dict(), reader=reader.state_dict())


def _captions(scenes: Iterable[Scene], seeds: list[float]) -> list[str]:
    """Return a caption for each scene, in the words that its seed chooses, and one without words."""
    return [*(caption(scene, random.Random(seed)) for scene, seed in zip(scenes, seeds, strict=True)), ""]


def embed(encoder: CLIPTextModel, pooling: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Embed the captions' tokens for both ways to the UNet.

    Returns (captions, tokens, WIDTH) and the pooled (captions, pooled width).
    """
    with half_precision(tokens.device):
        hidden = encoder(tokens).last_hidden_state
    return hidden.float(), pooling(hidden.float())


class SaidBefore:
    """An encoder and its pooling as they were when it was made."""

    def __init__(self, encoder: CLIPTextModel, pooling: nn.Module) -> None:
        self.encoder, self.pooling = copy.deepcopy(encoder), copy.deepcopy(pooling)

    def change(self, tokens: Tensor, placed: Tensor, hidden: Tensor, pooled: Tensor) -> Tensor:
        """Return the mean squared difference between what is said now of the captions and what was before.

        It is of both ways: word by word of the captions themselves, in the last `FACT_TOKENS` tokens of the same
        captions as `placed`, which say more.
        """
        with torch.no_grad():
            before, of_placed = (embed(self.encoder, self.pooling, some)[0] for some in (tokens, placed))
            before = torch.cat([before[:, :-FACT_TOKENS], of_placed[:, -FACT_TOKENS:]], dim=1)
            pooled_before = self.pooling(before)
        return functional.mse_loss(hidden, before) + functional.mse_loss(pooled, pooled_before)


def facts(scene: Scene) -> list[int]:
    """Return the right answer's index for each question in `ANSWERS`."""
    things = scene.things
    said: dict[str, str | None] = {
        "background": scene.background,
        "landscape": scene.landscape,
        "relation": scene.relation,
        "position": (things[0].position or DEFAULT_POSITION) if things else None,
    }
    for i in (1, 2):
        thing = things[i - 1] if len(things) >= i else None
        said[f"shape {i}"] = thing.shape if thing else None
        said[f"size {i}"] = thing.size if thing else None
    colors = scene.parts or tuple(thing.color for thing in things)
    for i in (1, 2, 3):
        said[f"color {i}"] = colors[i - 1] if len(colors) >= i else None
    for part, color in zip(LANDSCAPES.get(scene.landscape or "", ()), scene.parts, strict=True):
        place = PLACES_OF_PARTS[part]
        said |= {f"color of {part}": color, f"color at {place}": color, f"part at {place}": part}
    for place, thing in places_of(scene):
        said |= {f"color at {place}": thing.color, f"shape at {place}": thing.shape, f"size at {place}": thing.size}
    return [_index(choices, said.get(question)) for question, choices in ANSWERS.items()]


def _index(choices: tuple[str, ...], answer: str | None) -> int:
    if answer is None and ABSENT not in choices:
        return UNASKED
    return choices.index(answer or ABSENT)


def places_of(scene: Scene) -> list[tuple[str, Thing]]:
    """Return which object is where."""
    if len(scene.things) == 2:
        return list(zip(PLACES_OF_TWO.get(scene.relation or "", ("left", "right")), scene.things, strict=True))
    return [(thing.position or DEFAULT_POSITION, thing) for thing in scene.things]


def with_stated_place(scene: Scene) -> Scene:
    """Return the same scene, with the position of its one object as a position that is stated."""
    if len(scene.things) != 1:
        return scene
    ((position, thing),) = places_of(scene)
    return replace(scene, things=(replace(thing, position=position),))


class FactReader(nn.Module):
    """Answers every question twice: from the pooled text and from one of the last tokens.

    These are the two ways by which text reaches the UNet. What is at a place has a token of its own, which a query of
    that place can find by its position: from "first", "second" and "left of" alone the UNet hardly learned to put two
    objects where they belong (measured), and while a landscape's parts had none, at high noise a house had its roof's
    color all over or nowhere (seen). Red is the same direction in the token of every place, so that the UNet need
    learn it only once.

    An answer is a direction. Under a plain linear reader, and without any once the UNet learned, colors grew until a
    word such as "left" moved the pooled text by a twentieth of what "red" did, and the UNet ignored it (measured).
    """

    def __init__(self, pooled_width: int) -> None:
        super().__init__()
        count, at_a_place = (sum(map(len, answers.values())) for answers in (ANSWERS, ANSWERS_AT_A_PLACE))
        self.from_pooled = nn.Parameter(torch.randn(count, pooled_width))
        self.from_last = nn.Parameter(torch.randn(count - at_a_place * len(POSITIONS), WIDTH))
        self.from_place = nn.Parameter(torch.randn(at_a_place, WIDTH))

    def loss(self, pooled: Tensor, hidden: Tensor, scenes: list[Scene]) -> Tensor:
        """Return the mean cross entropy of all answers; pooled is (scenes, width), hidden (scenes, tokens, WIDTH)."""
        answers = torch.tensor([facts(scene) for scene in scenes], device=hidden.device)
        places = hidden[:, -1 - len(POSITIONS) : -1].flip(1)  # (scenes, places, WIDTH), the last but one first
        by_token = [_cosines(hidden[:, -1], self.from_last), _cosines(places, self.from_place).flatten(1)]
        by_pooled = _cosines(pooled, self.from_pooled)
        return (_answers_loss(by_pooled, answers) + _answers_loss(torch.cat(by_token, dim=1), answers)) / 2


def _cosines(vectors: Tensor, directions: Tensor) -> Tensor:
    return functional.normalize(vectors, dim=-1) @ functional.normalize(directions, dim=-1).T


def _answers_loss(cosines: Tensor, answers: Tensor) -> Tensor:
    scores = (SHARPNESS * cosines).split([len(choices) for choices in ANSWERS.values()], dim=1)
    losses = [
        functional.cross_entropy(score, right, ignore_index=UNASKED, reduction="none")
        for score, right in zip(scores, answers.T, strict=True)
    ]
    return torch.stack(losses).sum(dim=0).mean() / len(losses)
