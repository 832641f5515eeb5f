"""Reads the weights of a prompt as A1111 writes them: `(red:1.5)`, `(red)` for 1.1, `[red]` for 1/1.1, nested too."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

BRACKET = 1.1
"""`(red)` multiplies the weight by this, and `[red]` divides by it."""
_USUAL = {"(": BRACKET, "[": 1 / BRACKET}
_OPENED_BY = {")": "(", "]": "["}
MOST_WEIGHT = 10.0
MOST_LOWERED = 32
"""At most this many parts may weigh less than 1: the text encoder reads their chunks once more without each of them."""

_TOKENS = re.compile(
    r"""
    \\(?P<escaped>[()\[\]\\])
    | (?P<open>[(\[])
    | (?P<close>(?::\s*+(?P<weight>[+-]?(?:\d++\.?+\d*+|\.\d++))\s*+)?\)|])
    | [^()\[\]:\\]+ | [:\\]
    """,
    re.VERBOSE,
)
"""Nothing that it has read is read again (`++`), so that it takes time linear in the prompt."""


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
    weight that is negative or above `MOST_WEIGHT`, and on more than `MOST_LOWERED` parts that weigh less than 1. Takes
    time linear in the prompt.
    """
    by_weight = groupby(_pieces(prompt), key=lambda part: part.weight)  # a text with a literal bracket is read whole
    parts = tuple(Part("".join(part.text for part in same), weight) for weight, same in by_weight) or (Part(""),)
    for part in parts:
        if not part.weight <= MOST_WEIGHT:  # true of NaN as well, which 0 times infinity is
            raise ValueError(f"prompt_weights: a weight must be at most {MOST_WEIGHT:g}, not {part.weight:g}")
    lowered = sum(part.weight < 1 for part in parts)
    if lowered > MOST_LOWERED:
        raise ValueError(f"prompt_weights: at most {MOST_LOWERED} parts may weigh less than 1, not {lowered}")
    return parts


def _pieces(prompt: str) -> Iterator[Part]:
    tokens = list(_TOKENS.finditer(prompt))
    factors = _factors(tokens)
    products = {"(": [1.0], "[": [1.0]}  # what the open brackets of each kind make, innermost last
    for place, token in enumerate(tokens):
        if place not in factors:
            yield Part(token["escaped"] or token[0], products["("][-1] * products["["][-1])
        elif bracket := token["open"]:
            products[bracket].append(products[bracket][-1] * factors[place])
        else:
            products[_OPENED_BY[token["close"][-1]]].pop()


def _factors(tokens: Sequence[re.Match[str]]) -> dict[int, float]:
    """Return by what each bracket multiplies, for the tokens that open and close it; literal brackets are left out."""
    factors = dict[int, float]()
    opened: dict[str, list[int]] = {"(": [], "[": []}
    for place, token in enumerate(tokens):
        if bracket := token["open"]:
            opened[bracket].append(place)
            factors[place] = _USUAL[bracket]
        elif token["close"] and opened[bracket := _OPENED_BY[token["close"][-1]]]:
            factor = float(token["weight"] or _USUAL[bracket])
            if factor < 0:
                raise ValueError(f"prompt_weights: a weight must be at least 0, not {factor:g}")
            factors[place] = factors[opened[bracket].pop()] = factor
    return factors
