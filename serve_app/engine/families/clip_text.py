"""Encodes prompts with CLIP, in chunks where a prompt is longer than the encoder's window."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def encode_prompt(encoders: Sequence[TextEncoder], prompt: str, clip_skip: int = 0) -> Encoded:
    """Encode a prompt with every encoder, side by side, without the last `clip_skip` layers.

    A chunk is always encoded alone, so that its bits never vary.
    """
    tokens = [tokenize(encoder, prompt) for encoder in encoders]
    longest = max(len(chunks) for chunks in tokens)
    sides: list[Tensor] = []
    pooled: Tensor | None = None
    for encoder, chunks in zip(encoders, tokens, strict=True):
        chunks += tokenize(encoder, "") * (longest - len(chunks))
        answers = [_encode_chunk(encoder, chunk, clip_skip) for chunk in chunks]
        sides.append(torch.cat([hidden for hidden, _ in answers]))
        pooled = answers[0][1] if answers[0][1] is not None else pooled
    return Encoded(torch.cat(sides, dim=-1), pooled)


def pad_chunks(encoded: Encoded, chunks: int, encode_empty: Callable[[], Encoded]) -> Encoded:
    """Extend `encoded` with chunks of the empty prompt until it has `chunks`."""
    missing = chunks - encoded.chunks.shape[0]
    if missing <= 0:
        return encoded
    return encoded._replace(chunks=torch.cat([encoded.chunks, *[encode_empty().chunks[:1]] * missing]))


def tokenize(encoder: TextEncoder, prompt: str) -> list[list[int]]:
    """Return token ids in windows, each with the special tokens and padding of a prompt of its own."""
    tokenizer, window = encoder.tokenizer, encoder.window
    whole: list[int] = tokenizer(_all_vectors(tokenizer, prompt)).input_ids
    if len(whole) <= window:
        return [_padded(tokenizer, whole, window)]
    head, tail = _special_tokens(tokenizer)
    body = whole[len(head) : len(whole) - len(tail)]
    capacity = window - len(head) - len(tail)
    pieces = [body[start : start + capacity] for start in range(0, len(body), capacity)]
    return [_padded(tokenizer, [*head, *piece, *tail], window) for piece in pieces]


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


def _padded(tokenizer: Any, ids: list[int], window: int) -> list[int]:
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return ids + [padding] * (window - len(ids))


def _encode_chunk(encoder: TextEncoder, ids: list[int], clip_skip: int) -> tuple[Tensor, Tensor | None]:
    """Return hidden states [1, window, width], and the projected pooled vector [1, width] if there is one."""
    skipped = encoder.penultimate + clip_skip
    model = encoder.model
    tokens = torch.tensor([ids], device=model.device)
    mask = (
        torch.tensor([_mask(encoder, ids)], device=model.device)
        if getattr(model.config, "use_attention_mask", False)
        else None
    )
    answer = model(tokens, attention_mask=mask, output_hidden_states=skipped > 0)
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
