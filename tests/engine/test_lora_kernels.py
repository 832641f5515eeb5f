"""The LoRA kernel, in Triton's interpreter, adds what torch's products add, whatever stands beside a row."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from serve_app.engine import RunRequest
from serve_app.engine.adapter_slots import AdapterSlots, AddLora, LayerWeights, ModuleWeights
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.lora_layers import wrap_layers
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32, Kernels
from tests.engine.run_engine import final_latents, load
from tests.engine.test_unet_blocks import Operators

pytest.importorskip("triton", reason="Triton is made for Linux alone")
RANKS = (3, 8, 16, 33, 70, 200)
SCALES = (0.0, 0.5, -1.0, 0.3, 1.5, 0.75, 0.1)


@pytest.fixture
def add_lora(kernels: Kernels) -> AddLora:
    return kernels.lora.add_lora


def adapter(rank: int) -> LayerWeights:
    """One of random numbers; some have a gain, some act whole at every scale."""
    generator = torch.Generator().manual_seed(rank)
    shapes = {"0": (40, 24, 1, 1), "1": (72, 40, 3, 3), "3": (80, 72)}
    return {
        name: ModuleWeights(
            torch.randn(rank, *shape[1:], generator=generator) / 10,
            torch.randn(shape[0], rank, generator=generator) / 10,
            0.5,
            slope=torch.randn(shape[0], generator=generator) if rank in (8, 70) else None,
            unscaled=rank in (16, 70),
        )
        for name, shape in shapes.items()
        if (rank, name) != (3, "3")
    }


def net_with_adapters(dtype: torch.dtype, add_lora: AddLora | None) -> tuple[nn.Module, AdapterSlots]:
    """Return a pointwise convolution, one of 3×3 and a linear layer, and adapters of each rank in slots from 1 up."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (-1, 1)))
    net = nn.Sequential(nn.Conv2d(24, 40, 1), nn.Conv2d(40, 72, 3, padding=1), _Positions(), nn.Linear(72, 80), last)
    net = net.to(dtype).eval()
    slots = AdapterSlots(
        [wrap_layers(net)], 1 + len(RANKS), AdapterStore(torch.device("cpu"), dtype, 2**21), add_lora=add_lora
    )
    for slot, rank in enumerate(RANKS, 1):
        row = slots.pack(adapter(rank))
        start = slots.store.take(len(row.lines))
        assert start is not None
        slots.set(slot, row, start)
    return net, slots


class _Positions(nn.Module):
    """[rows, channels, height, width] as [rows, positions, channels], not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if request.param == torch.float16:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # few processors have it for float16
    return request.param


@torch.inference_mode()
def test_rows_get_what_torch_gives_them_and_keep_their_bits_in_any_company(
    dtype: torch.dtype, add_lora: AddLora
) -> None:
    torch_net, torch_slots = net_with_adapters(dtype, None)
    net, slots = net_with_adapters(dtype, add_lora)
    x = torch.randn(1 + len(RANKS), 24, 9, 8).to(dtype)
    everyone = list(range(1 + len(RANKS)))

    def output(places: list[int], net: nn.Module = net, slots: AdapterSlots = slots) -> torch.Tensor:
        slots.bind(places, [SCALES[i] for i in places])
        return net(x[places]).clone()

    together, expected = output(everyone), output(everyone, torch_net, torch_slots)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(together, expected, rtol=tolerance, atol=tolerance)
    for company in ([3, 0, 6, 1, 5, 2, 4], [4, 1], [6, 5, 4]):
        assert torch.equal(output(company), together[company]), company


@torch.inference_mode()
def test_batch_invariance_is_measured_by_the_kernel(add_lora: AddLora) -> None:
    torch_net, torch_slots = net_with_adapters(torch.float32, None)
    net, slots = net_with_adapters(torch.float32, add_lora)
    x = torch.randn(4, 24, 9, 8)
    for each in (slots, torch_slots):
        each.bind_random(range(4), 8, each.widest_layout)
    with Operators() as operators:
        answer = net(x)
    assert torch.allclose(answer, torch_net(x), rtol=1e-5, atol=1e-5)
    assert operators.calls["add_lora"] == 2, "one launch a layer, but for the convolution of 3×3"
    slots.bind_random(range(2), 8, slots.widest_layout)
    assert torch.equal(net(x[:2]), answer[:2])


@torch.inference_mode()
def test_a_row_keeps_its_bits_when_its_outputs_are_spread_over_more_programs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, slots = net_with_adapters(torch.float32, kernels.lora.add_lora)
    x = torch.randn(2, 24, 9, 8)
    slots.bind([5, 6], [1.0, 1.0])
    spread = net(x)
    monkeypatch.setattr(kernels.lora, "PROGRAMS", 1)
    assert torch.equal(net(x), spread)


def test_the_check_at_load_passes_and_tells_of_a_kernel_that_is_wrong(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in kernels:
        module.check(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(kernels.lora, "LINE_BYTES", 64)
    monkeypatch.setattr(kernels.unet, "geglu", lambda pairs: pairs.chunk(2, -1)[0])
    monkeypatch.setattr(kernels.transformer, "turn", lambda x, *_: x)
    monkeypatch.setattr(kernels.float8, "quantize", lambda x: (x.to(torch.float8_e4m3fn), torch.full((len(x), 1), 2.0)))
    for module in kernels:
        with pytest.raises(RuntimeError, match="off by up to"):
            module.check(torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_an_image_is_drawn_as_by_torch(
    small_sd: Path, tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(EXACT_FLOAT32, max_rows=2, exact=False)
    files = [
        tiny_models.write_lora(tmp_path / "4.safetensors", small_sd, rank=4, seed=4, size=0.05),
        tiny_models.write_lora(
            tmp_path / "24.safetensors",
            small_sd,
            rank=24,
            seed=24,
            targets=tiny_models.EVERYTHING,
            text=True,
            size=0.05,
        ),
    ]
    plain = RunRequest(run_id="", prompt="a cat", guidance=1.0, steps=1, width=32, height=32)
    requests = [replace(plain, run_id=f"{i}", adapter=file, seed=i) for i, file in enumerate(files)]
    expected = final_latents(load(small_sd, options), requests)
    kernels.use(monkeypatch)
    latents = final_latents(load(small_sd, options), requests)
    for key in expected:
        assert torch.allclose(latents[key], expected[key], atol=1e-5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve_app.engine import float8_kernels, lora_kernels, transformer_kernels

pointers = dict.fromkeys(("y", "x", "numbers"), "*bf16") | dict.fromkeys(("starts", "ranks", "unscaled", "slots"), "*i32")
tiles = {"LINE": 64, "BM": lora_kernels.POSITIONS, "BK": 64, "BN": lora_kernels.OUTPUTS}
names = lora_kernels._kernel.arg_names
signature = {name: {**pointers, "scales": "*fp32", **dict.fromkeys(tiles, "constexpr")}.get(name, "i32") for name in names}
aligned = [*pointers, "scales", "fan_in", "fan_out"]
source = ASTSource(
    lora_kernels._kernel, signature=signature, constexprs=tiles,
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
)
for capability in (80, 90):
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    print(capability, made.metadata.shared, "mma" in made.asm["ptx"], len(made.asm["cubin"]) > 0)

types = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "width": "i32", "BLOCK": "constexpr"}
made = triton.compile(
    ASTSource(float8_kernels._quantize, signature=types, constexprs={"BLOCK": 2048}), target=GPUTarget("cuda", 89, 32)
)
print(89, made.metadata.shared, "e4m3x2" in made.asm["ptx"], len(made.asm["cubin"]) > 0)

names = transformer_kernels._turn.arg_names
types = dict.fromkeys(("x", "weight", "y"), "*bf16") | {"rope": "*fp32", "eps": "fp32", "HEADS": "constexpr", "PAIRS": "constexpr"}
made = triton.compile(
    ASTSource(
        transformer_kernels._turn,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={"HEADS": 32, "PAIRS": 64},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "i32")[0] in "*i"},
    ),
    target=GPUTarget("cuda", 80, 32),
)
print("turn", made.metadata.shared, "ld.global.v4.b32" in made.asm["ptx"], len(made.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_since_ampere_within_the_shared_memory_of_the_smallest(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE]
    lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["80", "90", "89", "turn"]
    for line in lines:
        _, shared, *is_done = line.split()
        assert int(shared) <= 99 * 1024
        assert is_done == ["True", "True"]
