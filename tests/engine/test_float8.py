"""Base models whose large products are in float8: what is computed, how far it is from float32, and who may have it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import ScalingType

from serve_app.engine import Checkpoint, RunRequest
from serve_app.engine.float8 import Float8Linear, quantized, refuse_without_float8
from serve_app.engine.lora_layers import Change, LoRALinear
from tests.engine import tiny_models
from tests.engine.conftest import Kernels
from tests.engine.run_engine import ONE_AT_A_TIME, final_latents, load, start

REQUEST = RunRequest(run_id="k", prompt="a cat", seed=3, steps=4, guidance=4.0, width=64, height=64)


def layer(inputs: int = 96, outputs: int = 80, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)


@torch.inference_mode()
def test_a_product_is_that_of_torchs_float8_whatever_the_sizes_of_tokens() -> None:
    plain = layer()
    float8, x = Float8Linear(plain), torch.randn(7, 5, 96) * torch.logspace(-6, 6, 7)[:, None, None]
    x[3, 2] = 0
    x = x.bfloat16()
    codes, scale = quantized(x.flatten(0, 1))
    by_row = ScalingType.RowWise
    expected = (
        F.scaled_mm(codes, float8.codes.t(), scale, by_row, float8.scale.t(), by_row, output_dtype=torch.bfloat16)
        + plain.bias
    )
    y = float8(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=0.02, atol=0.01)
    away = (y - plain(x)).flatten(1).float().norm(dim=1) / plain(x).flatten(1).float().norm(dim=1)
    assert (away < 0.05).all(), "each token has a scale of its own"
    assert torch.equal(float8(x[2:3, :1])[0, 0], float8(x)[2, 0])


@torch.inference_mode()
def test_an_adapter_takes_the_input_before_it_is_rounded() -> None:
    plain = layer(dtype=torch.float32)
    rounded, exact, x = LoRALinear(plain), LoRALinear(plain), torch.randn(2, 6, 96)
    rounded.use(Float8Linear(plain))
    without = rounded(x), exact(x)
    rounded.change = exact.change = Change(torch.randn(2, 16, 96), torch.randn(2, 8, 80))
    torch.testing.assert_close(rounded(x) - without[0], exact(x) - without[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("folder", "most"), [("sd", 0.1), ("sdxl", 0.1), ("z_image", 0.1), ("klein", 0.1), ("flux1", 0.1)]
)
def test_a_base_model_in_float8_draws_nearly_the_same(folder: str, most: float, request: pytest.FixtureRequest) -> None:
    base: Path = request.getfixturevalue(folder)
    latents, weights = [], []
    for precision in ("", "fp8"):
        model = load(Checkpoint(base, precision=precision))
        latents.append(final_latents(model, [REQUEST])["k"])
        weights.append(model.weight_bytes)
        model.close()
    away = float((latents[1] - latents[0]).norm() / latents[0].norm())
    assert 1e-4 < away < most, away
    assert weights[1] < weights[0]


@torch.inference_mode()
def test_doras_magnitudes_are_of_the_rounded_weights(sd: Path, tmp_path: Path) -> None:
    """A DoRA whose magnitudes are the norms of what the layers compute with has no gain."""
    model = load(Checkpoint(sd, precision="fp8"))
    layers = model.family.components["unet"].layers
    tensors: dict[str, torch.Tensor] = {}
    for name in model.family.common_targets:
        if name.endswith("to_q"):
            weight = layers[name].weight
            tensors[f"unet.{name}.lora_A.weight"] = torch.randn(4, weight.shape[1])
            tensors[f"unet.{name}.lora_B.weight"] = torch.zeros(weight.shape[0], 4)
            tensors[f"unet.{name}.lora_magnitude_vector"] = weight.norm(dim=1)
    assert tensors
    adapter = tiny_models.write_adapter(tmp_path / "dora.safetensors", tensors)
    run = start(model, replace(REQUEST, adapter=adapter))
    model.adapter_slots.bind([run.slot], [1.0])
    gains = [layer.change.gain for layer in layers.values() if layer.change is not None]
    assert len(gains) == len(tensors) // 3
    for gain in gains:
        assert gain is not None
        torch.testing.assert_close(gain, torch.ones_like(gain))
    model.close()


@pytest.mark.parametrize("width", [16, 100, 1500])
@torch.inference_mode()
def test_the_kernel_rounds_as_torch_does(width: int, kernels: Kernels) -> None:
    """Triton's interpreter loses the carry of a rounding, one in about fifty."""
    x = torch.randn(9, width) * torch.logspace(-4, 4, 9)[:, None]
    x[4] = 0
    codes, scales = kernels.float8.quantize(x)
    expected_codes, expected_scales = quantized(x)
    torch.testing.assert_close(scales, expected_scales)
    same = codes.view(torch.uint8) == expected_codes.view(torch.uint8)
    assert same.float().mean() > 0.95
    assert torch.equal(kernels.float8.quantize(x[3:4])[0].view(torch.uint8)[0], codes.view(torch.uint8)[3])


def test_a_device_without_float8_refuses_by_name(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"precision: fp8 needs an NVIDIA GPU .* 8\.9 or later, and mps is none"):
        refuse_without_float8(torch.device("mps"), torch.bfloat16)
    for capability, refusal in (((8, 0), "needs an NVIDIA GPU"), ((9, 0), "goes with bfloat16, not torch.float16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(ValueError, match=refusal):
            refuse_without_float8(torch.device("cuda"), torch.float16)
    with pytest.raises(ValueError, match="base model m: precision: may be fp8, or is left out, not 'int4'"):
        load(Checkpoint(sd, precision="int4"), ONE_AT_A_TIME)
