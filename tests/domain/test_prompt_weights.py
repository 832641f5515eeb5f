"""Weights in prompts are read as A1111 reads them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.domain.prompt_weights import weighted
from tests.support import growth

PROMPTS = {
    "a cat": [("a cat", 1.0)],
    "a (red:1.5) cat": [("a ", 1.0), ("red", 1.5), (" cat", 1.0)],
    "(red) [green]": [("red", 1.1), (" ", 1.0), ("green", 1 / 1.1)],
    "((red) cat: 0.5)": [("red", 1.1 * 0.5), (" cat", 0.5)],
    # the example of A1111's own documentation of its parser
    "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).": [
        ("a ", 1.0), ("house", 1.573), (" ", 1.1), ("on", 1.0), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1),
        ("sky", 1.4641), (".", 1.1),
    ],
    r"a \(red:1.5\) \[cat\] \\": [("a (red:1.5) [cat] \\", 1.0)],
    "red:1.5) cat] a:b": [("red:1.5) cat] a:b", 1.0)],
    "(a:1.2.3) [b:2]": [("a:1.2.3", 1.1), (" ", 1.0), ("b:2", 1 / 1.1)],
    "a (red:+1.5) star :-1)": [("a ", 1.0), ("red", 1.5), (" star :-1)", 1.0)],
    "(a [b) c]": [("a ", 1.1), ("b", 1.0), (" c", 1 / 1.1)],
    "": [("", 1.0)],
    "(([])": [("", 1.0)],
}  # fmt: skip
"""Prompt → its parts and their weights."""


@pytest.mark.parametrize("prompt", PROMPTS)
def test_brackets_weight_what_is_in_them(prompt: str) -> None:
    parts = weighted(prompt)
    assert [part.text for part in parts] == [text for text, _ in PROMPTS[prompt]]
    assert [part.weight for part in parts] == pytest.approx([weight for _, weight in PROMPTS[prompt]])


@given(st.text())
def test_a_text_with_every_bracket_escaped_is_read_as_it_is(text: str) -> None:
    escaped = "".join(f"\\{letter}" if letter in "()[]\\" else letter for letter in text)
    assert weighted(escaped) == ((text, 1.0),)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("(a:10.5)", "at most 10, not 10.5"),
        ("a (red:-0.5) star", "at least 0, not -0.5"),
        (f"((a:0):{'9' * 400})", "at most 10, not nan"),
        ("(" * 25 + "a", "at most 10, not"),
        (f"(a:{'9' * 3000})", "at most 10, not inf"),
        ("[a] b " * 33, "at most 32 parts may weigh less than 1, not 33"),
    ],
)
def test_what_would_cost_too_much_or_overflow_is_refused(prompt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weighted(prompt)


@pytest.mark.parametrize("begin", ["", "(", "(:", "[(:"])
@pytest.mark.parametrize("repeat", ["(a", "[a", "9", ":9", ": ", "(a:1)", "a)", "\\", "-"])
def test_the_longest_nested_or_numeric_text_takes_linear_time(begin: str, repeat: str) -> None:
    def read(size: int) -> None:
        with suppress(ValueError):
            weighted(begin + repeat * (size // len(repeat)))

    assert growth(read, 500) < 24
