"""Encodes prompts with CLIP, in chunks where a prompt is longer than the encoder's window, and weights their words.

Weights act as the library compel makes them act: on a part above 1, the hidden states of its words move away from those
of the empty prompt by its weight; below 1, everything moves also towards the prompt in which the encoder does not see
its words, entirely at 0.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serve_app.domain.prompt_weights import Part
from serve_app.engine.families.family import Pause, no_pause

LEAST_WEIGHT = 1e-5
"""A weight acts as if it were at least this, where 0 would make the prompt without its words infinitely strong."""


class Encoded(NamedTuple):
    """A prompt's hidden states [chunks, window, width], and the first chunk's pooled vector or None."""

    chunks: Tensor
    pooled: Tensor | None


class TextEncoder(NamedTuple):
    """A tokenizer and its encoder; `penultimate` takes the hidden states before the last layer (SDXL)."""

    tokenizer: Any
    model: Any
    penultimate: bool

    @property
    def window(self) -> int:
        """Tokens of one encoder call, special tokens included."""
        return min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)


class Chunk(NamedTuple):
    """The token ids of one encoder call, and which part of the prompt each is of: -1 for special tokens and padding."""

    ids: list[int]
    places: list[int]


def encode_prompt(
    encoders: Sequence[TextEncoder], parts: Sequence[Part], clip_skip: int = 0, pause: Pause = no_pause
) -> Encoded:
    """Encode a prompt with every encoder, side by side, without the last `clip_skip` layers.

    A chunk is always encoded alone, so that its bits never vary. Weights leave the pooled vector as it is. `pause` is
    called between chunks: other prompts may be encoded meanwhile.
    """
    tokens = [tokenize(encoder, parts) for encoder in encoders]
    longest = max(len(chunks) for chunks in tokens)
    sides: list[Tensor] = []
    pooled: Tensor | None = None
    for encoder, chunks in zip(encoders, tokens, strict=True):
        chunks += tokenize(encoder, [Part("")]) * (longest - len(chunks))
        answers: list[tuple[Tensor, Tensor | None]] = []
        for chunk in chunks:
            answers.append(_encode_chunk(encoder, chunk.ids, clip_skip))
            pause()
        pooled = answers[0][1] if answers[0][1] is not None else pooled
        hidden = [states for states, _ in answers]
        if any(part.weight != 1 for part in parts):
            hidden = _weighted(encoder, parts, chunks, hidden, clip_skip, pause)
        sides.append(torch.cat(hidden))
    return Encoded(torch.cat(sides, dim=-1), pooled)


def _weighted(
    encoder: TextEncoder,
    parts: Sequence[Part],
    chunks: Sequence[Chunk],
    hidden: Sequence[Tensor],
    clip_skip: int,
    pause: Pause,
) -> list[Tensor]:
    """Return the hidden states [1, window, width] of the chunks as the parts' weights move them."""
    (nothing,) = tokenize(encoder, [Part("")])
    empty = _encode_chunk(encoder, nothing.ids, clip_skip)[0].float()
    # compel, which the tests compare with: a part's absence has no share at weight 1, half at 0.5, and all at 0
    absences = {
        index: math.tan((1 - max(part.weight, LEAST_WEIGHT)) * math.pi / 2)
        for index, part in enumerate(parts)
        if part.weight < 1 and any(index in chunk.places for chunk in chunks)
    }
    whole = 1 + sum(absences.values())
    moved: list[Tensor] = []
    for chunk, states in zip(chunks, hidden, strict=True):
        factors = [1.0 if place < 0 else parts[place].weight for place in chunk.places]
        away = torch.tensor(factors, device=states.device)[None, :, None]
        absent = {index: share / whole for index, share in absences.items() if index in chunk.places}
        mixed = (1 - sum(absent.values())) * states.float()
        for index, share in absent.items():
            mixed += share * _encode_chunk(encoder, chunk.ids, clip_skip, [p == index for p in chunk.places])[0].float()
            pause()
        moved.append(torch.where(away == 1, mixed, empty + (mixed - empty) * away).to(states.dtype))
    return moved


def pad_chunks(encoded: Encoded, chunks: int, encode_empty: Callable[[], Encoded]) -> Encoded:
    """Extend `encoded` with chunks of the empty prompt until it has `chunks`."""
    missing = chunks - encoded.chunks.shape[0]
    if missing <= 0:
        return encoded
    return encoded._replace(chunks=torch.cat([encoded.chunks, *[encode_empty().chunks[:1]] * missing]))


def tokenize(encoder: TextEncoder, parts: Sequence[Part]) -> list[Chunk]:
    """Return the tokens of a prompt in windows, each with the special tokens and padding of a prompt of its own.

    Each part is read alone, so no word reaches over two.
    """
    tokenizer, window = encoder.tokenizer, encoder.window
    head, tail = _special_tokens(tokenizer)
    body = list[tuple[int, int]]()
    for place, part in enumerate(parts):
        ids: list[int] = tokenizer(_all_vectors(tokenizer, part.text)).input_ids
        body += [(token, place) for token in ids[len(head) : len(ids) - len(tail)]]
    capacity = window - len(head) - len(tail)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    chunks: list[Chunk] = []
    for start in range(0, max(1, len(body)), capacity):
        piece = body[start : start + capacity]
        ids = [*head, *(token for token, _ in piece), *tail]
        places = [*[-1] * len(head), *(place for _, place in piece), *[-1] * len(tail)]
        missing = window - len(ids)
        chunks.append(Chunk(ids + [padding] * missing, places + [-1] * missing))
    return chunks


def _all_vectors(tokenizer: Any, prompt: str) -> str:
    """Write each token that was trained as several vectors as all of them: `<cat>` as `<cat> <cat>_1 <cat>_2`.

    diffusers' textual inversion adds them to a tokenizer under these names.
    """
    added = tokenizer.added_tokens_encoder
    for token in dict.fromkeys(tokenizer.tokenize(prompt)):
        if token in added and f"{token}_1" in added:
            vectors = itertools.takewhile(added.__contains__, (f"{token}_{i}" for i in itertools.count(1)))
            prompt = prompt.replace(token, " ".join([token, *vectors]))
    return prompt


def clip_aliases(layers: Iterable[str]) -> dict[str, str]:
    """Map names of adapter files to a CLIP encoder's layers: `text_model.` or not, `to_q` as `q_proj`."""
    aliases: dict[str, str] = {}
    for layer in layers:
        bare = layer.removeprefix("text_model.")
        names = {layer, bare, "text_model." + bare}
        names |= {name.replace(f".{p}_proj", f".to_{p}") for name in set(names) for p in "qkv"} | {
            name.replace(".out_proj", ".to_out") for name in set(names)
        }
        aliases |= dict.fromkeys(names, layer)
    return aliases


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and after a prompt."""
    around: list[int] = tokenizer("").input_ids
    if len(around) == 1 and around[0] == tokenizer.eos_token_id:
        return [], around
    return around[:1], around[1:]


def _encode_chunk(
    encoder: TextEncoder, ids: list[int], clip_skip: int, hidden_from: Sequence[bool] = ()
) -> tuple[Tensor, Tensor | None]:
    """Return hidden states [1, window, width], and the projected pooled vector [1, width] if there is one.

    No token attends to those for which `hidden_from` is true.
    """
    skipped = encoder.penultimate + clip_skip
    model = encoder.model
    tokens = torch.tensor([ids], device=model.device)
    mask = _mask(encoder, ids) if getattr(model.config, "use_attention_mask", False) else None
    if hidden_from:
        mask = [seen and not away for seen, away in zip(mask or [1] * len(ids), hidden_from, strict=True)]
    seen = None if mask is None else torch.tensor([mask], device=model.device, dtype=torch.long)
    answer = model(tokens, attention_mask=seen, output_hidden_states=skipped > 0)
    hidden: Tensor = answer.hidden_states[-1 - skipped] if skipped else answer.last_hidden_state
    if skipped and not encoder.penultimate:
        hidden = getattr(model, "text_model", model).final_layer_norm(hidden)
    return hidden, getattr(answer, "text_embeds", None)


def _mask(encoder: TextEncoder, ids: list[int]) -> list[int]:
    """1 for a prompt's own tokens: everything before the padding, whose id may equal the end token's."""
    padding = encoder.tokenizer.pad_token_id
    length = len(ids)
    while length and ids[length - 1] == padding:
        length -= 1
    return [1] * length + [0] * (len(ids) - length)
