"""The model card has what a hub reads and names the model's whole world, and its snippets run."""

import re
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.support import POCKET, ROOT

TEXT = (POCKET / "README.md").read_text()
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


def test_the_card_names_every_style() -> None:
    assert {file.stem for file in (POCKET / "loras").iterdir()} <= set(re.findall(r"\w+", TEXT))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["diffusers", "engine"])
def test_a_snippet_runs_and_draws(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They draw in fewer steps than the card says, which come out in as many colors."""
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(re.sub(r"steps=\d+", "steps=6", snippet), names)
    image: Image.Image = names["image"] if "image" in names else names["images"][0]
    assert image.size == (512, 512)
    assert len(set(image.resize((64, 64)).tobytes())) > 50, "a picture, not one color"
