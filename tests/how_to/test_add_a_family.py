"""The page on adding a family leads to one that draws."""

import json
from pathlib import Path

import pytest

from tests.how_to.pages import check, follow, run

PROGRAM = """
import json, shutil
from pathlib import Path

import numpy as np

from serve_app.domain.families import abilities_of
from serve_app.engine import Engine
from serve_app.loras.catalog_file import pipeline_of

folder = Path("models/mirror")
shutil.copytree("models/pocket", folder)
index = folder / "model_index.json"
index.write_text(index.read_text().replace("StableDiffusionPipeline", "StableDiffusionPAGPipeline"))
asked = {"prompt": "a red circle", "steps": 2, "width": 256, "height": 256, "seeds": [7]}
with Engine.load({"mirror": folder, "pocket": Path("models/pocket")}) as engine:
    pictures = [engine.generate(**asked, base_model=name)[0] for name in ("mirror", "pocket")]
    family = type(engine.model("mirror").family).__module__
drawn, plain = (np.asarray(each).astype(int) for each in pictures)
difference = float(abs(drawn - plain).mean())
print(json.dumps([family, abilities_of(pipeline_of(folder)).longest_side, drawn.shape, difference]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_toy_family_of_the_page_draws(tmp_path: Path) -> None:
    tree = follow("add-a-family", tmp_path)
    check(tree)
    family, longest, shape, difference = json.loads(run(tree, PROGRAM).splitlines()[-1])
    assert (family, longest, shape) == ("serve_app.engine.families.mirror", 768, [256, 256, 3])
    assert difference > 1, "it draws as Stable Diffusion does"
