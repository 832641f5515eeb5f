"""Looking at unfinished images changes nothing of them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from serve_app.engine import Engine, EngineOptions, RunRequest
from serve_app.engine.families.family import latent_rgb
from tests.engine.run_engine import finish
from tests.support import POCKET

HEART = RunRequest(run_id="heart", prompt="a large red heart on a white background", steps=8, width=256, height=256)


@pytest.fixture(scope="module")
def pocket_engine() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine:
        yield engine


@pytest.mark.slow
def test_an_image_is_the_same_whether_it_is_looked_at_or_not(pocket_engine: Engine) -> None:
    unseen = finish(pocket_engine, [HEART])["heart"].image
    pocket_engine.add(HEART)
    seen: dict[int, np.ndarray] = {}
    ended: list[np.ndarray | None] = []
    while not ended:
        ended = [finished.image for finished in pocket_engine.step()]
        if (looked := pocket_engine.unfinished("heart", 64)) is not None:
            seen[looked[0]] = looked[1]
    assert unseen is not None
    assert ended[0] is not None
    assert np.array_equal(unseen, ended[0])
    assert list(seen) == list(range(1, 8))
    assert {picture.shape for picture in seen.values()} == {(16, 16, 3)}
    shown, drawn = seen[7].astype(int), unseen.reshape(16, 16, 16, 16, 3).mean(axis=(1, 3))
    assert np.abs(shown - drawn).mean() < 40, "the preview shows what is drawn"


def test_a_run_that_has_not_begun_or_is_unknown_shows_nothing(pocket_engine: Engine) -> None:
    pocket_engine.add(HEART)
    assert pocket_engine.unfinished("heart", 64) is None
    assert pocket_engine.unfinished("no such run", 64) is None
    pocket_engine.abort("heart")
    pocket_engine.step()


@pytest.mark.parametrize(
    ("vae", "channels", "is_xl"),
    [("AutoencoderKL", 4, False), ("AutoencoderKL", 4, True), ("AutoencoderKL", 16, False)],
)
def test_a_picture_is_no_larger_than_asked_for(vae: str, channels: int, is_xl: bool) -> None:
    rgb = latent_rgb(vae, channels, is_xl=is_xl)
    assert rgb is not None
    assert rgb.pixels(torch.randn(channels, 96, 128), 64).shape == (48, 64, 3)
    assert rgb.pixels(torch.full((channels, 8, 8), torch.nan), 64).shape == (8, 8, 3)


def test_an_unknown_autoencoder_has_no_previews() -> None:
    assert latent_rgb("AutoencoderKL", 32, is_xl=False) is None
