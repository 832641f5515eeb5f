"""The table of families and their code are one: each entry has code, and the code does what the entry says."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.domain import families
from serve_app.domain.samplers import Sampler
from serve_app.engine import RunRequest
from serve_app.engine.families import family as family_module
from serve_app.engine.families.registry import FAMILIES, load_family
from serve_app.model_folder import index_of
from tests.engine import (
    tiny_anima,
    tiny_flux1,
    tiny_flux2_klein,
    tiny_krea2,
    tiny_models,
    tiny_qwen_image21,
    tiny_z_image,
)
from tests.engine.conftest import EXACT_FLOAT32

WRITERS = {
    "sd": tiny_models.write_sd,
    "sdxl": tiny_models.write_sdxl,
    "flux1": tiny_flux1.write_flux1,
    "flux2-klein": tiny_flux2_klein.write_flux2_klein,
    "z-image": tiny_z_image.write_z_image,
    "krea-2": tiny_krea2.write_krea2,
    "anima": tiny_anima.write_anima,
    "qwen-image-2.1": tiny_qwen_image21.write_qwen_image21,
}
"""The families of `serve_app/domain/families.py`, of which each needs a row here."""


def test_each_entry_has_code_and_all_code_an_entry() -> None:
    assert families.FAMILIES.keys() == FAMILIES.keys() == WRITERS.keys()
    folder = Path(family_module.__file__).parent
    with_code = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"^class \w+Family\b(?!\((Protocol|ABC))", path.read_text(), re.M)
    }
    assert {code.__module__.rpartition(".")[2] for code in FAMILIES.values()} == with_code
    pipelines = [pipeline for family in families.FAMILIES.values() for pipeline in family.pipelines]
    assert len({*pipelines}) == len(pipelines)
    assert families.abilities_of("FluxFillPipeline") == families.abilities_of("") == families.UNKNOWN


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_family_does_what_its_entry_says(name: str, tmp_path: Path) -> None:
    family, abilities = load_family(WRITERS[name](tmp_path), EXACT_FLOAT32), families.FAMILIES[name].abilities
    assert index_of(tmp_path)["_class_name"] in families.FAMILIES[name].pipelines
    assert family.begins_from_images == abilities.begins_late
    for marks in families.FAMILIES[name].marks:
        layers = [f".{layer}." for layer in (*family.components[family.denoiser].layers, *family.components)]
        assert not marks.layers or any(re.search(marks.layers, layer) for layer in layers)
    request = RunRequest(run_id="r", prompt="red", steps=2, guidance=1.0, width=64, height=64)

    def takes(**changed: Any) -> bool:
        asked = replace(request, **changed)
        try:
            family.schedule(asked)
            family.encode(asked, "")
        except ValueError:
            return False
        return True

    assert [sampler for sampler in Sampler if takes(sampler=sampler)] == [*abilities.samplers]
    assert takes(prompt_weights=True) == abilities.prompt_weights
    picture = np.zeros((64, 64, 3), np.uint8)
    assert takes(image=picture, strength=0.01) != abilities.rounds_down
    begun = family.schedule(replace(request, image=picture, strength=0.5))
    assert begun.steps == (1 if abilities.begins_late else 2)
    short, long = (family.encode(replace(request, prompt=text), "").context.shape[1] for text in ("red", "red " * 600))
    assert any(family.unread(replace(request, prompt="red " * 600))) == (abilities.text.stop < 2400)
    assert short >= abilities.text.start
    assert long == abilities.text.stop - 1 if abilities.text.stop < 600 else long > 600
