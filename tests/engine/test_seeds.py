"""Every bit of a seed counts, and the noise is drawn on the CPU whatever the device."""

import numpy as np
import pytest
import torch

from serve_app.engine import RunRequest
from serve_app.engine.runner import seeded_generator
from tests.engine.conftest import WIDE_FLOAT32
from tests.engine.run_engine import load, start

SMALL_SEEDS = (0, 1, 2**31, 2**32 - 1)
LARGE_SEEDS = (2**32, 2**32 + 1, 2**53, 2**63, 2**64 - 1)


@pytest.mark.parametrize("seed", SMALL_SEEDS)
def test_a_seed_of_32_bits_is_torchs_own(seed: int) -> None:
    """The pictures of diffusers, and those of earlier versions."""
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.randn(1000, generator=seeded_generator(seed)), expected)


@pytest.mark.parametrize("seed", LARGE_SEEDS)
def test_a_larger_seed_is_the_mersenne_twisters_init_by_array(seed: int) -> None:
    """numpy seeds by the same rule; torch makes a float32 of the low 24 bits of a word."""
    words = np.random.RandomState([seed % 2**32, seed // 2**32]).randint(0, 2**32, 5000, dtype=np.uint32)
    drawn = torch.rand(5000, generator=seeded_generator(seed))
    assert np.array_equal(drawn.numpy(), (words & 0xFFFFFF).astype(np.float32) / 2**24)
    assert seeded_generator(seed).initial_seed() == seed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_seeds_that_share_32_bits_start_from_different_latents(family: str, request: pytest.FixtureRequest) -> None:
    model = load(request.getfixturevalue(family), WIDE_FLOAT32)
    latents: list[torch.Tensor] = []
    for seed in (0, 2**32, 2**53, 2**63, 7, 2**32 + 7):
        run = start(model, RunRequest(run_id="r", prompt="", seed=seed, steps=3, width=64, height=64))
        assert run.generator.device.type == "cpu"  # the same latents on every device
        expected = torch.randn((1, 4, 8, 8), generator=seeded_generator(seed))[0] * run.schedule.noise_scale
        assert torch.equal(run.latents, expected)
        latents.append(run.latents)
    for i, one in enumerate(latents):
        assert not any(torch.equal(one, other) for other in latents[:i])
