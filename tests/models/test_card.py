"""The model card says what the published files and the report say, and its snippets run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from models.pocket.recipe.card import CARD, measured_sections, replace_section, write_card
from models.pocket.recipe.scenes import COLOURS
from models.pocket.recipe.styles import STYLES
from tests.support import POCKET, ROOT

TEXT = CARD.read_text()
REPORT = json.loads((POCKET / "report.json").read_text())
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def front_matter() -> dict[str, Any]:
    before, matter, _ = TEXT.split("---\n", maxsplit=2)
    assert before == ""
    return yaml.safe_load(matter)


def test_the_front_matter_has_what_a_model_hub_reads() -> None:
    matter = front_matter()
    assert matter["library_name"] == "diffusers"
    assert matter["pipeline_tag"] == "text-to-image"
    assert {"language", "license", "tags"} <= matter.keys()


@pytest.mark.parametrize("section", sorted(measured_sections(REPORT)))
def test_measured_tables_are_those_of_the_files_and_the_report(section: str) -> None:
    assert measured_sections(REPORT)[section] in TEXT


def test_writing_the_card_again_changes_nothing(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(TEXT)
    write_card(REPORT, card)
    assert card.read_text() == TEXT


def test_a_card_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        replace_section("# A card", "figures", "new")


def test_the_card_names_every_colour_and_style() -> None:
    assert {*COLOURS, *STYLES} <= set(re.findall(r"\w+", TEXT))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["diffusers", "engine"])
def test_a_snippet_runs_and_draws(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(snippet, names)
    image: Image.Image = names["image"] if "image" in names else names["images"][0]
    assert image.size == (512, 512)
    assert len(set(image.resize((64, 64)).tobytes())) > 50, "a picture, not one colour"
