"""The README's Python examples run as they are pasted, and print nothing but what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.live import Live
from tests.support import ROOT


def python_block(containing: str) -> str:
    """The README's one Python block that contains a text."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return block


def test_the_bundled_model_knows_the_words_of_every_prompt() -> None:
    vocabulary = json.loads((ROOT / "models/pocket/tokenizer/vocab.json").read_text())
    pages = (ROOT / "README.md", *(ROOT / "docs" / "integrate").glob("*.md"), *(ROOT / "docs" / "start").glob("*.md"))
    texts = [page.read_text() for page in pages]
    asked = r"""(?:prompt": |generate\()"([^"]+)"|map\(\["([^]]+)"\]"""
    words = {word for text in texts for prompts in re.findall(asked, text) for word in re.findall(r"\w+", str(prompts))}
    assert len(words) > 10
    assert not {word for word in words if f"{word}</w>" not in vocabulary}


def run_program(program: str, folder: Path) -> str:
    """What a program prints, errors and warnings included."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_engine_example_prints_no_warnings_and_saves_an_image(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    program = python_block("Engine.load")
    assert "seeds=[1, 2]" in program
    assert run_program(program.replace("seeds=[1, 2]", "seeds=[1, 2], steps=2"), tmp_path) == ""
    assert Image.open(tmp_path / "flower.png").size == (512, 512)


@pytest.mark.slow
def test_the_client_example_prints_nothing_and_saves_two_images(live: Live, tmp_path: Path) -> None:
    _, key = live.member()
    access = {"base_url": live.base_url, "keys": {"both": key}}
    (tmp_path / "var").mkdir(exist_ok=True)
    (tmp_path / "var" / "local.json").write_text(json.dumps(access))
    assert run_program(python_block("Client("), tmp_path) == ""
    sizes = [Image.open(tmp_path / name).size for name in ("mountains.png", "large.png")]
    assert sizes == [(512, 512), (1024, 1024)]


@pytest.mark.parametrize("picture", re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text()))
def test_the_pictures_are_there_and_small(picture: str) -> None:
    assert (ROOT / picture).stat().st_size < 300_000
