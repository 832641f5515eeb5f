"""The watermark is found in what became of a marked picture, by its secret alone, and nobody sees it."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.watermark import CHANGES, HOPPER, half, psnr, score
from serve_app.domain.requests import ImageFormat
from serve_app.marking.watermark import LEAST_SIDE, THRESHOLD, Pixels, Watermark, luminance_of
from serve_app.settings import Settings
from serve_app.worker.image_files import encode

MARK, OTHER = Watermark(b"ours"), Watermark(b"another operator's")


def photo(width: int = 512, height: int = 512) -> Pixels:
    return np.asarray(Image.open(HOPPER).convert("RGB").resize((width, height)))


def plain() -> Pixels:
    """Return the picture in which a pattern has the least to hide behind: one colour, white, which takes no more."""
    drawn = np.full((512, 512, 3), (250, 120, 40), np.uint8)
    drawn[:256] = 255
    return drawn


@pytest.mark.parametrize("make", [photo, plain, lambda: photo(768, 256)], ids=["photo", "plain", "wide"])
def test_the_mark_is_found_by_its_secret_alone_and_not_seen(make: Callable[[], Pixels]) -> None:
    picture = make()
    marked = MARK.added_to(picture)
    assert marked.shape == picture.shape
    assert psnr(picture, marked) >= 42.1, "no level is changed by more than two"
    for name in ("unchanged", "JPEG 80", "half the size", "half the size, JPEG 80"):
        changed = CHANGES[name](marked)
        assert score(MARK, changed) >= THRESHOLD, name
        assert abs(score(OTHER, changed)) < THRESHOLD, name
    assert abs(score(MARK, picture)) < THRESHOLD


@pytest.mark.parametrize("form", ImageFormat)
def test_the_smallest_picture_that_is_marked_keeps_it_in_every_format(form: ImageFormat) -> None:
    for picture in (photo(LEAST_SIDE, LEAST_SIDE), np.full((LEAST_SIDE, LEAST_SIDE, 3), (250, 120, 40), np.uint8)):
        file = Image.open(BytesIO(encode(MARK.added_to(picture), form)))
        assert MARK.score(luminance_of(file)) >= THRESHOLD
    smaller = photo(LEAST_SIDE - 1, 512)
    assert np.array_equal(MARK.added_to(smaller), smaller)


def test_without_a_secret_of_its_own_it_is_of_the_lowest_pepper(tmp_path: Path) -> None:
    """So pictures that were marked before a new pepper are still found."""

    def key(**secrets: Any) -> bytes:
        return Settings(data_dir=tmp_path, **secrets).watermark_key

    first, second = "a pepper of 16 bytes", "another of 16 bytes"
    marked = Watermark(key(pepper=first)).added_to(photo())
    assert score(Watermark(key(peppers={2: second, 1: first})), marked) >= THRESHOLD
    assert score(Watermark(key(pepper=second, watermark_secret=first)), marked) >= THRESHOLD, "after a new pepper alone"
    assert score(Watermark(key(peppers={2: second})), marked) < THRESHOLD
    assert key(pepper=first, watermark_secret=second) == key(pepper=second, watermark_secret=second)


def test_the_same_pixels_and_secret_give_the_same_picture() -> None:
    assert np.array_equal(MARK.added_to(photo()), Watermark(b"ours").added_to(photo()))
    assert not np.array_equal(MARK.added_to(photo()), OTHER.added_to(photo()))


def test_an_enlarged_copy_has_the_mark_of_its_source() -> None:
    large = np.asarray(Image.fromarray(MARK.added_to(photo())).resize((1024, 1024), Image.Resampling.LANCZOS))
    assert score(MARK, large) >= THRESHOLD
    twice = MARK.added_to(large)
    assert score(MARK, half(half(twice))) >= THRESHOLD
    assert psnr(large, twice) >= 42.1


def test_scores_without_the_mark_are_those_of_a_tossed_coin() -> None:
    """The threshold is 5.26 of their standard deviations, whatever the picture shows."""
    assert pytest.approx(5.257, abs=0.001) == THRESHOLD
    for picture in (photo(), plain(), np.zeros((256, 256, 3), np.uint8)):
        luminance = luminance_of(Image.fromarray(picture))
        scores = [Watermark(b"%d" % secret).score(luminance) for secret in range(60)]
        assert max(map(abs, scores)) < THRESHOLD
        assert np.std(scores) < 1.5
