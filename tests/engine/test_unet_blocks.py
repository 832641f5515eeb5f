"""Our blocks compute what diffusers' UNets do, with fewer operators, and what a run keeps constant only once."""

import copy
import gc
import importlib
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.families.unet_blocks import run_constants, use_blocks
from serve_app.engine.lora_layers import wrap_layers
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import finish, load, start

diffusers: Any = importlib.import_module("diffusers")

WIDTH = 24
SMALL = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
KINDS = {
    "1": {},
    "2": {"use_linear_projection": True, "attention_head_dim": (2, 4), "upcast_attention": True},
    "XL": {
        "use_linear_projection": True,
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 58,
    },
    "bundled": {"addition_embed_type": "text", "addition_embed_type_num_heads": 4},
    "distilled": {"time_cond_proj_dim": 8},
}


class Operators(TorchDispatchMode):
    """Count the operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.calls[name] for name in ("linear", "conv2d", "_linear_pointwise"))


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(**(SMALL | options)).eval().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_blocks_compute_what_diffusers_does_with_fewer_operators(kind: str) -> None:
    plain = made(**KINDS[kind])
    ours = copy.deepcopy(plain)
    crosses = use_blocks(ours)
    embeddings = sum("add_embedding" in name for name, layer in plain.named_modules() if type(layer) is torch.nn.Linear)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    wrap_layers(ours)
    x = torch.randn(3, 4, 8, 12).to(memory_format=torch.channels_last)
    context, times = torch.randn(3, 10, WIDTH), torch.tensor([900.0, 500.0, 1.0])
    added = {"text_embeds": torch.randn(3, 10), "time_ids": torch.rand(3, 6) * 64} if kind == "XL" else {}
    cond = torch.randn(3, 8) if kind == "distilled" else None
    constants = run_constants(ours, crosses, context, added)
    passed = {"keys_values": constants.pop("keys_values")}
    with Operators() as before:
        expected = plain(x, times, context, timestep_cond=cond, added_cond_kwargs=added, return_dict=False)[0]
    with Operators() as after:
        answer = ours(
            x,
            times,
            context,
            timestep_cond=cond,
            added_cond_kwargs=constants,
            cross_attention_kwargs=passed,
            return_dict=False,
        )[0]
    assert (answer - expected).abs().max() < 1e-5
    assert after.calls["div"] <= 1, "the sinusoids of the time divide once"
    assert after.calls["silu"] < before.calls["silu"] - len(crosses), "one for the time, not one a block"
    assert after.products == before.products - 2 * len(crosses) - embeddings, "the text's own are not computed again"


@pytest.mark.parametrize(
    "option",
    [{"resnet_time_scale_shift": "scale_shift"}, {"resnet_out_scale_factor": 2.0}, {"only_cross_attention": True}],
    ids=str,
)
def test_a_unet_of_another_kind_stays_as_it_is(option: dict[str, Any]) -> None:
    unet = made(**option)
    before = [type(module) for module in unet.modules()]
    assert use_blocks(unet) == []
    assert [type(module) for module in unet.modules()] == before


def test_the_keys_and_values_of_a_run_are_computed_once_and_go_when_it_ends(engine: Engine) -> None:
    (model,) = engine.base_models.values()
    layers = [layer for name, layer in model.family.components["unet"].layers.items() if name.endswith("attn2.to_k")]
    calls: list[object] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: calls.append(module))
    engine.add(RunRequest(run_id="k", prompt="a cat", steps=3, width=64, height=64))
    while (run := engine.live.running("k")) is None:
        engine.step()
    kept = weakref.ref(run.conditioning.added["keys_values"])
    del run
    finish(engine)
    assert Counter(calls) == Counter(layers)
    gc.collect()
    assert kept() is None


@torch.inference_mode()
def test_the_keys_and_values_are_those_of_the_runs_adapter_at_its_scale(sd: Path, tmp_path: Path) -> None:
    model = load(sd, EXACT_FLOAT32)
    file = tiny_models.write_lora(tmp_path / "a.safetensors", sd, rank=4, seed=1, dora=True)

    def keys_values(adapter: AdapterFile | None, scale: float) -> torch.Tensor:
        request = RunRequest(run_id="k", prompt="a cat", adapter=adapter, scale=scale, width=64, height=64)
        return start(model, request).conditioning.added["keys_values"]

    bare, half, whole = keys_values(None, 1.0), keys_values(file, 0.5), keys_values(file, 1.0)
    assert torch.equal(bare, keys_values(None, 0.3))
    assert not torch.equal(bare, half)
    assert not torch.equal(half, whole)
