"""The kernel of queries and keys, in Triton's interpreter, computes what torch computes, and a row keeps its bits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from serve_app.engine import RunRequest
from serve_app.engine.families.dit import AttendsByPlace
from tests.engine.conftest import EXACT_FLOAT32, Kernels
from tests.engine.run_engine import final_latents, load


@pytest.mark.parametrize("rope_rows", [1, 3])
@pytest.mark.parametrize(("heads", "width", "is_cut"), [(4, 32, False), (3, 24, True), (2, 128, True)])
@torch.inference_mode()
def test_queries_are_those_of_torch(heads: int, width: int, is_cut: bool, rope_rows: int, kernels: Kernels) -> None:
    """A cut tensor is a part of what one layer computed for queries, keys and values; so is a cut rope."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(width, eps=1e-6)
    nn.init.normal_(norm.weight)
    whole = torch.randn(3, 7, 3 * heads * width)
    x = (
        whole[..., heads * width : 2 * heads * width] if is_cut else whole[..., : heads * width].contiguous()
    ).unflatten(2, (heads, width))
    rope = torch.polar(torch.ones(rope_rows, 9, 1, width // 2), torch.randn(rope_rows, 9, 1, width // 2))[:, 2:]
    layer = AttendsByPlace()
    expected = layer.placed(norm, x, rope)
    layer.turn = kernels.transformer.turn
    answer = layer.placed(norm, x, rope)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=0)
    assert answer.is_contiguous()
    alone = layer.placed(norm, x[1:2].clone(), rope[1:2].clone() if rope_rows > 1 else rope)
    assert torch.equal(alone[0], answer[1])


@torch.inference_mode()
def test_what_is_normalized_is_rounded_as_torch_rounds_it(kernels: Kernels) -> None:
    """As the models were trained: their numbers have 16 bits between the norm and the turn."""
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(64, eps=1e-6, dtype=torch.float16), torch.randn(1, 5, 4, 64, dtype=torch.float16)
    still = torch.ones(1, 5, 1, 32, dtype=torch.complex64)
    assert torch.equal(kernels.transformer.turn(x, norm.weight, still, 1e-6), F.rms_norm(x, (64,), norm.weight, 1e-6))
    assert AttendsByPlace().placed(None, x, still).dtype == x.dtype, "a model without norms is left to torch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "prompts"),
    [
        ("z_image", ["a cat", "a"]),
        ("klein", ["a cat"]),
        ("qwen_image21", ["a cat", "a"]),
        pytest.param("flux1", ["a cat"], marks=pytest.mark.soak),
    ],
)
def test_an_image_is_drawn_as_by_torch(
    folder: str, prompts: list[str], kernels: Kernels, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = request.getfixturevalue(folder), replace(EXACT_FLOAT32, exact=False)
    plain = RunRequest(run_id="", prompt="", guidance=1.0, steps=1, width=32, height=48)
    requests = [replace(plain, run_id=prompt, prompt=prompt) for prompt in prompts]
    expected = final_latents(load(path, options), requests)
    kernels.use(monkeypatch)
    model = load(path, options)
    assert {layer.turn for layer in model.denoiser.modules() if isinstance(layer, AttendsByPlace)} == {
        kernels.transformer.turn
    }
    for key, latents in final_latents(model, requests).items():
        torch.testing.assert_close(latents, expected[key], atol=1e-5, rtol=0)
