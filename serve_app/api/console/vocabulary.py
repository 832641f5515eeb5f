"""The words that a base model knows, where they are few: the bundled model has read nothing but its own captions."""

import asyncio
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from serve_app.domain.catalog import BaseModel

MOST_TOKENS = 2000
"""A tokenizer of more tokens writes any word; CLIP's own has 49,408."""
_WORD = re.compile(r"[^\W\d_]+")
_END = "</w>"


async def known_words(base_models: Sequence[BaseModel]) -> dict[str, frozenset[str]]:
    """The words of each base model that knows only few; the others are left out."""
    found = {model.id: await asyncio.to_thread(_words_in, model.source) for model in base_models}
    return {name: words for name, words in found.items() if words}


def unknown_words(prompt: str, known: frozenset[str]) -> list[str]:
    """The words of a prompt that the model has never read, each once."""
    return list(dict.fromkeys(word for word in _WORD.findall(prompt.lower()) if word not in known))


@lru_cache(maxsize=64)
def _words_in(source: str) -> frozenset[str]:
    """Whole words of the tokenizer of a diffusers folder; none where there is no such file or it has many tokens."""
    try:
        tokens: dict[str, int] = json.loads((Path(source) / "tokenizer" / "vocab.json").read_text())
    except (OSError, ValueError):
        return frozenset()
    if len(tokens) > MOST_TOKENS:
        return frozenset()
    return frozenset(token.removesuffix(_END) for token in tokens if token.endswith(_END))
