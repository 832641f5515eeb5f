import hashlib
import sys
from dataclasses import field, fields, make_dataclass, replace
from typing import Any

import pytest

from serve_app.domain.catalog import Offer
from serve_app.domain.digests import Digests
from serve_app.domain.requests import (
    GenerationDraft,
    GenerationRequest,
    LoraUse,
    Picture,
    UpscaleDraft,
    UpscaleRequest,
    image_seeds,
    is_composite,
    to_seed_space,
)


@pytest.mark.parametrize("seed", [0, 1, 2**53, 2**63, 2**64 - 1])
def test_a_seed_of_64_bits_is_taken_as_it_is(seed: int) -> None:
    assert to_seed_space(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**80)])
def test_any_other_integer_goes_through_its_decimal_text(seed: int) -> None:
    expected = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
    assert to_seed_space(seed) == expected


def test_image_i_takes_seed_plus_i_before_the_mapping() -> None:
    assert image_seeds(-1, 3) == (to_seed_space(-1), 0, 1)
    assert image_seeds(2**64 - 1, 2) == (2**64 - 1, to_seed_space(2**64))


def test_the_longest_seed_still_has_a_successor() -> None:
    longest = int("9" * sys.get_int_max_str_digits())
    first, second = image_seeds(longest, 2)
    assert first == to_seed_space(longest)
    assert second == to_seed_space(longest + 1)
    assert first != second


def test_work_counts_images_steps_and_pixels() -> None:
    request = GenerationRequest(prompt="a star", loras=(LoraUse("x"),), width=768, height=512, steps=20, seeds=(1, 2))
    assert request.num_images == 2
    assert request.work == pytest.approx(2 * 20 * 768 * 512 / 1e6)
    begun = replace(request, image=Picture("img_x", "memory://x"), strength=0.25)
    assert begun.work == pytest.approx(request.work / 4), "an image leaves a part of the steps"


def test_what_a_record_of_before_does_not_tell_counts_as_a_composite() -> None:
    request = GenerationRequest(prompt="a star", seeds=(1,))
    assert not is_composite(request)
    begun = replace(request, image=Picture("img_x", "memory://x"))
    assert [is_composite(replace(begun, from_upload=each)) for each in (None, True, False)] == [True, True, False]


def test_an_upscale_knows_its_size() -> None:
    request = UpscaleRequest(
        image_id="img_x", scale_factor=4, source_uri="file:///x", source_width=512, source_height=768
    )
    assert (request.width, request.height) == (2048, 3072)


@pytest.mark.parametrize(
    "asked",
    [
        GenerationRequest(prompt="a star", loras=(LoraUse("x"),), seeds=(1,)),
        UpscaleDraft(image_id="img_x"),
        GenerationDraft(prompt="a star", seed=None, metadata={"a": "b"}),
        Offer(name="Ink", base_model="pocket"),
        LoraUse("x", 0.5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_field_that_is_added_changes_no_digest_until_it_is_given(asked: Any) -> None:
    added = ("added", int, field(default=1))
    newer: Any = make_dataclass(type(asked).__name__, [added], bases=(type(asked),), frozen=True, kw_only=True)
    now = {each.name: getattr(asked, each.name) for each in fields(asked)}
    digests = [Digests.of([each], "") for each in (asked, newer(**now), newer(**now, added=2))]
    assert digests[0] == digests[1] != digests[2]
