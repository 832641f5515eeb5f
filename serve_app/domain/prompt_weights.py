"""Reads the weights of a prompt as A1111 writes them: `(red:1.5)`, `(red)` for 1.1, `[red]` for 1/1.1, nested too."""

import re
from collections.abc import Iterator
from typing import NamedTuple

BRACKET = 1.1
"""`(red)` multiplies the weight by this, and `[red]` divides by it."""
MOST_WEIGHT = 10.0
MOST_LOWERED = 32
"""So many parts may weigh less than 1, since the text encoder reads the prompt once more without each of them."""

_TOKENS = re.compile(
    r"""
    \\(?P<escaped>[()\[\]\\])
    | (?P<open>[(\[])
    | :\s*(?P<weight>\d+\.?\d*|\.\d+)\s*\)
    | (?P<close>[)\]])
    | [^()\[\]:\\]+ | [:\\]
    """,
    re.VERBOSE,
)


class Part(NamedTuple):
    """A piece of a prompt, and the weight of its words; 1 leaves them as they are."""

    text: str
    weight: float = 1.0


def literal(prompt: str) -> tuple[Part, ...]:
    """Return a prompt whose brackets are words like others."""
    return (Part(prompt),)


def weighted(prompt: str) -> tuple[Part, ...]:
    r"""Return the parts of a prompt without the brackets that weight them; `\(`, `\)`, `\[`, `\]` and `\\` are literal.

    A bracket that is never closed acts to the end, and one that was never opened is literal. Raises ValueError on a
    weight above `MOST_WEIGHT`, and on more than `MOST_LOWERED` parts that weigh less than 1.
    """
    parts = tuple(_merged(_weights(prompt)))
    highest = max(part.weight for part in parts)
    if highest > MOST_WEIGHT:
        raise ValueError(f"prompt_weights: a weight must be at most {MOST_WEIGHT:g}, not {highest:g}")
    lowered = sum(part.weight < 1 for part in parts)
    if lowered > MOST_LOWERED:
        raise ValueError(f"prompt_weights: at most {MOST_LOWERED} parts may weigh less than 1, not {lowered}")
    return parts


def _weights(prompt: str) -> Iterator[Part]:
    texts, weights = list[str](), list[float]()
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, factor: float) -> bool:
        if not opened[bracket]:
            return False
        for index in range(opened[bracket].pop(), len(weights)):
            weights[index] *= factor
        return True

    for token in _TOKENS.finditer(prompt):
        if bracket := token["open"]:
            opened[bracket].append(len(texts))
            continue
        if token["weight"] is not None and close("(", float(token["weight"])):
            continue
        if token["close"] == ")" and close("(", BRACKET):
            continue
        if token["close"] == "]" and close("[", 1 / BRACKET):
            continue
        texts.append(token["escaped"] or token[0])
        weights.append(1.0)
    for bracket, factor in (("(", BRACKET), ("[", 1 / BRACKET)):
        while close(bracket, factor):
            pass
    return map(Part, texts, weights)


def _merged(parts: Iterator[Part]) -> Iterator[Part]:
    """Join neighbours of one weight, so that a text with a literal bracket in it is read as a whole."""
    text, weight = "", 1.0
    for part in parts:
        if part.weight == weight:
            text += part.text
            continue
        if text:
            yield Part(text, weight)
        text, weight = part
    yield Part(text, weight)
