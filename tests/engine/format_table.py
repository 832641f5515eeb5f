"""Writes the list of docs/draw/lora-formats.md: every format of adapters that the tests compare, by base models.

    python -m tests.engine.format_table

It runs the rows of `test_adapter_formats.py` and `test_transformer_adapters.py` at every weight, in one process (about
two minutes). The words above the list are the document's own.
"""

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from serve_app.settings import ROOT
from tests.engine.latent_comparison import EVERY_WEIGHT, SOME_WEIGHTS, compared

DOCUMENT = ROOT / "docs" / "draw" / "lora-formats.md"
BASES: Mapping[str, str] = {
    "sd": "SD 1",
    "sd2": "SD 2",
    "sdxl": "SDXL",
    "z_image": "Z-Image",
    "flux2_klein": "FLUX.2 klein",
    "flux1": "FLUX.1",
    "krea2": "Krea 2",
    "anima": "Anima",
    "qwen_image21": "Qwen-Image 2.1",
}
WRITERS: Mapping[str, str] = {
    "test_what_sd_scripts_saved_gives_what_sd_scripts_made": "sd-scripts",
    "test_a_peft_folder_gives_what_peft_makes": "PEFT folder",
    "test_what_diffusers_saves_gives_what_peft_makes": "diffusers",
    "test_dora_under_other_names_gives_what_peft_makes": "PEFT renamed",
    "test_what_lycoris_saves_gives_what_lycoris_makes": "LyCORIS",
    "test_what_musubi_tuner_saved_gives_the_merged_result": "musubi-tuner",
    "test_every_spelling_gives_the_merged_result": "by hand",
    "test_parts_of_joined_layers_give_the_merged_result": "by hand",
}
"""Whose own result a row is compared with, by the test that does it."""
FUSED = ", fused"
"""Ends the name of a format whose queries, keys and values are one layer."""
MARKS: Mapping[str, Collection[str]] = {"": [], "†": ["z_image"], "‡": ["z_image", "flux2_klein", "flux1"]}
"""What stands behind a format's name in the list: on which base models it was compared fused as well."""
_HEAD = "- LyCORIS\n"
"""Where the list begins: below each writer are lines of base models and formats."""
_TESTS = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("adapter_formats", "transformer_adapters")]
_TEST = re.compile(r"::(test_\w+)\[(.+)-every-weight\]")
_ROW = re.compile(rf"(.+)-({'|'.join(BASES)})(?:-(\w+))?")


class Format(NamedTuple):
    """An entry of the list."""

    writer: str
    name: str


def main() -> int:
    status = pytest.main(
        ["-q", "-n", "0", "-p", "no:randomly", "-m", "soak or not soak", "-k", "every-weight", *_TESTS]
    )
    if status:
        return int(status)
    errors: dict[Format, dict[str, float]] = {}
    for test, error in compared.items():
        if found := _TEST.search(test):
            name, base = of_row(found[2])
            errors.setdefault(Format(WRITERS[found[1]], name), {})[base] = error
    words = DOCUMENT.read_text(encoding="utf-8").partition(_HEAD)[0]
    DOCUMENT.write_text(words + listed(errors), encoding="utf-8")
    return 0


def listed(errors: Mapping[Format, Mapping[str, float]]) -> str:
    """Return the list: of each writer, the formats that were compared on the same base models."""
    together: dict[tuple[str, str], list[str]] = {}
    plain = [each for each in errors if (each.writer, each.name.removesuffix(FUSED)) not in errors.keys() - {each}]
    for each in sorted(plain, key=lambda each: (each.writer, -len(errors[each]), each.name)):
        bases = ", ".join(title for base, title in BASES.items() if base in errors[each])
        fused = errors.get(Format(each.writer, each.name + FUSED), {})
        (mark,) = (mark for mark, on in MARKS.items() if set(on) == set(fused))
        together.setdefault((each.writer, bases), []).append(f"`{each.name}`{mark}")
    largest = max(error for by_base in errors.values() for error in by_base.values())
    text = ""
    for (writer, bases), names in together.items():
        text += "" if f"- {writer}\n" in text else f"- {writer}\n"
        entry = f"    - {bases}: {'; '.join(names)}"
        text += fill(entry, 120, subsequent_indent=" " * 6, break_on_hyphens=False) + "\n"
    return f"{text}\nThe largest error was {largest:.0e}.\n"


def of_row(row_id: str) -> tuple[str, str]:
    """Return the format and the base model of a row such as `without q_proj-sdxl-text_encoder_2`."""
    found = _ROW.fullmatch(row_id)
    assert found is not None, row_id
    part = "" if found[3] in (None, "unet") else f", {found[3].replace('_', ' ')}"
    return found[1].replace("_", " ") + part, found[2]


def rows(*named: tuple[Any, ...], in_full: Collection[str] = ()) -> list[Any]:
    """Return rows of a label, a base model and more, each at some weights or at every one.

    Behind `make soak` all are at every weight. The main suite has each format once, on the first base model that has
    it, and each base model once: at some weights, or where the label is `in_full` at every one, so that a rule that
    holds at 0.75 alone does not pass.
    """
    made, seen = list[Any](), set[str]()
    for label, base, *more in named:
        name = str(getattr(label, "label", label))
        part = "".join(f"-{each}" for each in more if str(each).startswith("text_encoder"))
        # A spelling of the original code's names is another kind than one of diffusers', under the same label.
        kind = f"{label}{part}".removeprefix(f"{base}_")
        row_id, full = f"{name}-{base}{part}", kind not in seen and name in in_full
        # So one process opens it. The first base model's rows are many: as one group they would run before any other.
        together = [] if base == named[0][1] else [pytest.mark.xdist_group(f"adapters of {base}")]
        marks = together if full else [*together, pytest.mark.soak]
        made.append(pytest.param(label, base, *more, EVERY_WEIGHT, id=f"{row_id}-every-weight", marks=marks))
        if not full and not {kind, str(base)} <= seen:
            made.append(pytest.param(label, base, *more, SOME_WEIGHTS, id=f"{row_id}-some-weights", marks=together))
        seen |= {kind, str(base)}
    return made


def documented() -> set[tuple[str, str, str]]:
    """Writer, format and base model of every format in the document."""
    _, head, text = DOCUMENT.read_text(encoding="utf-8").partition(_HEAD)
    titles = {title: base for base, title in BASES.items()}
    found, writer = set[tuple[str, str, str]](), ""
    for entry in re.split(r"\n(?= *- )", (head + text).partition("\n\n")[0]):
        bases, _, names = " ".join(entry.split()).removeprefix("- ").partition(": ")
        writer = writer if names else bases
        for name, mark in re.findall("`([^`]+)`([†‡]?)", names):
            found |= {(writer, name, titles[title]) for title in bases.split(", ")}
            found |= {(writer, name + FUSED, base) for base in MARKS[mark]}
    return found


def rows_of(module: ModuleType) -> set[tuple[str, str, str]]:
    """Return the same of the rows of a module's tests."""
    tests = {test: getattr(vars(module)[test], "pytestmark", []) for test in WRITERS.keys() & vars(module).keys()}
    ids = [(test, str(row.id)) for test, marks in tests.items() for mark in marks for row in mark.args[1]]
    return {
        (WRITERS[test], *of_row(row_id.removesuffix("-every-weight")))
        for test, row_id in ids
        if row_id.endswith("-every-weight")
    }


if __name__ == "__main__":
    sys.exit(main())
