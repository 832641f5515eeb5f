"""The page on adding a sampler leads to one that can be asked for, and draws."""

import json
from pathlib import Path

import pytest

from tests.how_to.pages import check, follow, run

PROGRAM = """
import json
from pathlib import Path

import numpy as np

from serve_app.domain.families import abilities_of
from serve_app.engine import Engine
from serve_app.loras.catalog_file import pipeline_of
from serve_app.web.console.playground_form import SAMPLERS

asked = {"prompt": "a red circle", "steps": 6, "width": 256, "height": 256, "seeds": [7]}
with Engine.load(Path("models/pocket")) as engine:
    pictures = [engine.generate(**asked, sampler=f"dpm++{order}m-karras")[0] for order in (2, 3)]
second, third = (np.asarray(each).astype(int) for each in pictures)
offered = "dpm++3m" in abilities_of(pipeline_of(Path("models/pocket"))).samplers
print(json.dumps([offered, "dpm++3m" in SAMPLERS, float(abs(third - second).mean())]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sampler_of_the_page_draws(tmp_path: Path) -> None:
    tree = follow("add-a-sampler", tmp_path)
    check(tree)
    *offered, difference = json.loads(run(tree, PROGRAM).splitlines()[-1])
    assert offered == [True, True], "by the base model, and in the playground"
    assert difference > 0.1, "it draws as DPM++ 2M does"
