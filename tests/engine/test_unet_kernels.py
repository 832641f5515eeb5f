"""A UNet's kernels, in Triton's interpreter, compute what torch computes, and a row keeps its bits in any company."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from serve_app.engine.families.unet_blocks import GroupNorm
from tests.engine.conftest import Kernels

LARGE_MEAN = 100.0
"""Far from 0 a sum of squares would lose the variance."""


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("channels", "groups", "sides"),
    [(64, 32, (8, 8)), (96, 32, (13, 11)), (70, 7, (3, 50)), (64, 2, (4200,))],
    ids=["whole tiles", "cut tiles", "cut channels", "many parts to join"],
)
@torch.inference_mode()
def test_group_norm_is_that_of_torch(
    channels: int, groups: int, sides: tuple[int, ...], silu: bool, kernels: Kernels
) -> None:
    torch.manual_seed(0)
    plain = nn.GroupNorm(groups, channels)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    norm = GroupNorm(plain, kernels.unet.group_norm)
    normed = norm.with_silu if silu else norm
    x = (torch.randn(3, *sides, channels) + LARGE_MEAN).movedim(-1, 1)
    answer = normed(x)
    expected = F.group_norm(x.double(), groups, plain.weight.double(), plain.bias.double())
    assert (answer - (F.silu(expected) if silu else expected)).abs().max() < 1e-4
    assert answer.stride() == x.stride(), "channels stay last"
    alone = normed(x[1:2].clone(memory_format=torch.preserve_format))
    assert torch.equal(alone[0], answer[1])


@torch.inference_mode()
def test_an_image_whose_channels_come_first_is_left_to_torch(kernels: Kernels) -> None:
    plain, x = nn.GroupNorm(4, 8), torch.randn(2, 8, 5, 6)
    assert torch.equal(GroupNorm(plain, kernels.unet.group_norm).with_silu(x), F.silu(plain(x)))


@torch.inference_mode()
def test_geglu_is_that_of_torch(kernels: Kernels) -> None:
    x = torch.randn(2, 7, 2 * 1500)
    value, gate = x.chunk(2, -1)
    answer = kernels.unet.geglu(x)
    assert torch.allclose(answer, value * F.gelu(gate), atol=1e-5)
    assert torch.equal(kernels.unet.geglu(x[1:]), answer[1:])
