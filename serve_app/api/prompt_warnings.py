"""Writes `X-Unknown-Words`: the prompt's words that its base model has never read."""

from collections.abc import Iterable
from urllib.parse import quote

from starlette.requests import Request

from serve_app.api.dependencies import resources_of
from serve_app.stores.acceptance import Acceptance

NAME = "X-Unknown-Words"
MOST_WORDS, LONGEST = 20, 500
"""Words and characters of the header's value."""


async def unknown_words_header(request: Request, acceptance: Acceptance, prompt: str) -> dict[str, str]:
    """Return the header, where the prompt of an accepted generation has such words."""
    vocabulary = resources_of(request).vocabulary
    words = await vocabulary.unknown_words(prompt, acceptance.base_model, acceptance.trigger_words)
    value = header_value(words)
    return {NAME: value} if value else {}


def header_value(words: Iterable[str]) -> str:
    """Join words by commas, percent-encoded beyond ASCII; of too many the first."""
    value = ""
    for word in list(words)[:MOST_WORDS]:
        longer = f"{value}, {quote(word)}" if value else quote(word)
        if len(longer) > LONGEST:
            break
        value = longer
    return value
