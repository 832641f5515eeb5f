"""Finds the words of a prompt that a base model with a small vocabulary has never read."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from serve_app.domain.catalog import BaseModel
from serve_app.domain.errors import StoreUnavailable
from serve_app.loras.applied_catalog import AppliedCatalog

MOST_TOKENS = 2000
"""A tokenizer of more tokens writes any word; CLIP's own has 49,408."""
READ_EVERY_S = 60.0
_WORD = re.compile(r"[^\W\d_]+")
_END = "</w>"


class Vocabulary:
    """Reads the words of base models once a minute, so that a prompt is checked without asking Redis."""

    def __init__(self, catalog: AppliedCatalog) -> None:
        self._catalog = catalog
        self._words: Mapping[str, frozenset[str]] = {}
        self._read_again_at = 0.0

    async def words(self) -> Mapping[str, frozenset[str]]:
        """Return the words of each base model that knows only few; while Redis is away, the last known."""
        if time.monotonic() >= self._read_again_at:
            with suppress(StoreUnavailable):
                self._words = await known_words(await self._catalog.applied_base_models())
                self._read_again_at = time.monotonic() + READ_EVERY_S
        return self._words

    async def unknown_words(self, prompt: str, base_model: str, trigger_words: Sequence[str] = ()) -> list[str]:
        """Return the prompt's words that are unknown to the base model and the LoRA's trigger words."""
        known = (await self.words()).get(base_model)
        return unknown_words(prompt, known.union(*map(words_of, trigger_words))) if known else []


async def known_words(base_models: Sequence[BaseModel]) -> dict[str, frozenset[str]]:
    """Return the words of each base model that knows only few; the others are left out."""
    found = {model.id: await asyncio.to_thread(_words_in, model.source) for model in base_models}
    return {name: words for name, words in found.items() if words}


def unknown_words(prompt: str, known: frozenset[str]) -> list[str]:
    """Return the words of a prompt that are not among the known ones, each once."""
    return list(dict.fromkeys(word for word in words_of(prompt) if word not in known))


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@lru_cache(maxsize=64)
def _words_in(source: str) -> frozenset[str]:
    """Read the words of a diffusers folder's tokenizer; none where it is missing or has many tokens."""
    try:
        tokens: dict[str, int] = json.loads((Path(source) / "tokenizer" / "vocab.json").read_text())
    except (OSError, ValueError):
        return frozenset()
    if len(tokens) > MOST_TOKENS:
        return frozenset()
    return frozenset(token.removesuffix(_END) for token in tokens if token.endswith(_END))
