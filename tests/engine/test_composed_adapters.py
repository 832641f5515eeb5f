"""Several LoRAs in one run do to the base what each does alone, added: by the own layers of PEFT and LyCORIS."""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serve_app.engine import AdapterFile, Engine, RunRequest, adapter_slots, as_one
from serve_app.engine.adapters.layer_table import UnusableAdapter
from tests.engine import tiny_models
from tests.engine.latent_comparison import EFFECT, TOLERANCE, Base
from tests.engine.run_engine import ONE_AT_A_TIME, final_latents, finish
from tests.engine.test_adapter_formats import LYCORIS, OF_ENCODERS, PEFT_CONFIGS, lycoris_network, peft_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("composed adapters")]
Adapted = Mapping[str, nn.Module]
"""Components in which a library has put its adapter, by name."""
LORA, TUNED = ("unet", PEFT_CONFIGS["alpha 16 of rank 4"]), ("unet", PEFT_CONFIGS["patterns"])
LOCON, DORA = ("unet", PEFT_CONFIGS["convolutions"]), ("unet", PEFT_CONFIGS["DoRA"])
DORA_OF_CONVOLUTIONS = ("unet", PEFT_CONFIGS["DoRA of convolutions"])
TEXT, TEXT_DORA = ("text_encoder", OF_ENCODERS["without q_proj"]), ("text_encoder", PEFT_CONFIGS["DoRA"])
MIXES: Mapping[str, Sequence[tuple[Any, float]]] = {
    "LoRAs": [(LORA, 0.8), (TUNED, -0.6)],
    "text encoders": [(TEXT, 1.0), (LORA, 0.5), (TEXT_DORA, -1.0)],
    "DoRAs": [(DORA, 0.75), ("locon DoRA", 1.5), (DORA_OF_CONVOLUTIONS, 2.0), (TUNED, 1.0)],
    "LyCORIS": [("LoHa", -1.0), ("LoKr low-rank", 1.2), ("IA3 with inputs", 0.7), (LOCON, 0.5)],
    "LoKr's factors": [("LoKr full as factors", 1.2), (LORA, -0.8), (LOCON, 0.5), ("locon DoRA", 0.0)],
    "gains of inputs": [("locon DoRA per input", 0.5), ("LoKr DoRA per input", -0.8), (LORA, 1.0)],
    "weights of zero": [(DORA, 0.0), (LORA, 0.0), ("locon DoRA", 0.0), ("LoKr", 0.75)],
}
"""Adapters of PEFT (a component and its configuration) and of LyCORIS (by name), each with its weight."""
ROWS = [
    *(pytest.param("sd", name, id=f"sd-{name}") for name in MIXES),
    pytest.param("sdxl", "DoRAs", id="sdxl-DoRAs"),
    *(pytest.param("sdxl", name, id=f"sdxl-{name}", marks=pytest.mark.soak) for name in MIXES if name != "DoRAs"),
]


def written(base: Base, adapter: Any, weight: float, path: Path) -> tuple[AdapterFile, Adapted]:
    """Return an adapter's file, and copies of the base with the adapter in place by its own library, at the weight."""
    if isinstance(adapter, str):
        copies = copy.deepcopy(base.components)
        network = lycoris_network(copies, **LYCORIS[adapter])
        type(network).apply_preset({"name_algo_map": {}})  # which stays with the class
        network.save_weights(str(path), None, {"ss_network_module": "lycoris.kohya"})
        for layer in network.loras:
            layer.multiplier = weight
        network.set_multiplier(weight)
        return AdapterFile(str(path), path), copies if weight else {}
    component, config = adapter
    model = peft_model(base, component, config)
    folder = path.with_suffix("")
    model.save_pretrained(str(folder))
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling = {name: scaling * weight for name, scaling in layer.scaling.items()}
    return AdapterFile(str(path), folder), {component: model.base_model.model}


@contextmanager
def together(base: Base, adapted: Sequence[Adapted]) -> Generator[None]:
    """Let each layer of the pipeline add what every adapted copy of it changes."""
    changed: list[nn.Module] = []
    for part, component in base.components.items():
        copies = [each[part] for each in adapted if part in each]
        for name, layer in component.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                vars(layer)["forward"] = partial(_sum, layer.forward, [each.get_submodule(name) for each in copies])
                changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del vars(layer)["forward"]


def _sum(forward: Callable[[Tensor], Tensor], copies: Sequence[nn.Module], x: Tensor) -> Tensor:
    y = forward(x)
    return y + sum((each(x) - y for each in copies), torch.zeros(()))


def made(base: Base, files: Sequence[tuple[AdapterFile, float]]) -> Tensor:
    """Return the engine's latents of what `Base.latents` draws, beside a run without an adapter."""
    adapter, scale = as_one(files)
    plain = RunRequest(run_id="plain", prompt="a red cat", negative_prompt="dull", seed=7, steps=2, guidance=4.0,
                       width=32, height=32)  # fmt: skip
    composed = replace(plain, run_id="composed", adapter=adapter, scale=scale)
    latents = final_latents(base.engine_model, [plain, composed])
    assert (latents["plain"] - base.plain).abs().max() < TOLERANCE
    return latents["composed"]


@pytest.mark.parametrize(("base_name", "mix"), ROWS)
def test_loras_together_change_the_base_by_the_sum_of_what_each_changes(
    bases: Callable[[str], Base], tmp_path: Path, base_name: str, mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases(base_name)
    if "factors" in mix:  # layers as small as these take a LoKr as a LoRA
        monkeypatch.setattr(adapter_slots, "FACTORS_RANK", 0)
    weights = [weight for _, weight in MIXES[mix]]
    made_of = [
        written(base, adapter, weight, tmp_path / f"{i}.safetensors") for i, (adapter, weight) in enumerate(MIXES[mix])
    ]
    ours = made(base, [(file, weight) for (file, _), weight in zip(made_of, weights, strict=True)])
    with together(base, [adapted for _, adapted in made_of]):
        theirs = base.latents()
    assert (theirs - base.plain).abs().max() > EFFECT, "the reference shows no effect"
    error = float((ours - theirs).abs().max())
    print(f"\n{base_name} {mix}: {error:.1e}")  # noqa: T201 - with `-s`
    assert error <= TOLERANCE


def test_a_change_is_exact_where_the_gains_of_several_loras_cancel(
    bases: Callable[[str], Base], tmp_path: Path
) -> None:
    """IA³ takes half of a layer's outputs away, and a LoRA adds to them."""
    base, layer = bases("sd"), "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    width = base.components["unet"].get_submodule(layer).weight.shape[0]
    taken = torch.arange(width).remainder(2).float()
    stem = "lora_unet_" + layer.replace(".", "_")
    ia3 = tiny_models.write_adapter(
        tmp_path / "ia3.safetensors", {f"{stem}.weight": -2 * taken, f"{stem}.on_input": torch.tensor(False)}
    )
    down, up = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(1)) * 0.3
    lora = tiny_models.write_adapter(
        tmp_path / "lora.safetensors", {f"unet.{layer}.lora_A.weight": down, f"unet.{layer}.lora_B.weight": up.T}
    )
    weight = base.components["unet"].get_submodule(layer).weight.detach()
    theirs = base.merged({("unet", layer): 1.5 * up.T @ down - taken[:, None] * weight}, 1.0)
    assert (theirs - base.plain).abs().max() > EFFECT
    assert (made(base, [(lora, 1.5), (ia3, 0.5)]) - theirs).abs().max() <= TOLERANCE


def test_the_order_of_loras_changes_no_byte_and_reads_nothing_again(sd: Path, loras: list[AdapterFile]) -> None:
    paths = [lora.path for lora in loras[:3]]
    weights = dict(zip(paths, (0.5, -1.0, 1.5), strict=True))
    backwards = {path: weights[path] for path in reversed(paths)}
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        draw = partial(engine.generate, "a cat", steps=2, width=64, height=64)
        (first,), (again,) = draw(adapters=weights), draw(adapters=backwards)
        (beside,) = draw(adapter=paths[0], weight=0.5, adapters={path: weights[path] for path in paths[1:]})
        assert len(engine.measured.loads) == 1
        (alone,), (other) = draw(adapters={paths[0]: 0.5}), draw(adapters={**weights, paths[0]: 0.4})
        (single,), (none,) = draw(adapter=paths[0], weight=0.5), draw()
    assert first.tobytes() == again.tobytes() == beside.tobytes()
    assert alone.tobytes() == single.tobytes()
    assert len({image.tobytes() for image in (first, alone, none, *other)}) == 4


def test_loras_that_cannot_be_one_are_refused_by_name(
    bases: Callable[[str], Base], sd: Path, loras: list[AdapterFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases("sd")
    monkeypatch.setattr(adapter_slots, "FACTORS_RANK", 0)
    inputs, outputs, lokr, other = (
        written(base, name, 1.0, tmp_path / f"{name}.safetensors")[0]
        for name in ("locon DoRA per input", "IA3", "LoKr full as factors", "LoKr DoRA as factors")
    )
    numberless = tiny_models.random_lora(sd, rank=4, seed=1)
    broken = tiny_models.write_adapter(
        tmp_path / "nan.safetensors", {name: tensor * float("nan") for name, tensor in numberless.items()}
    )
    large = [tiny_models.write_lora(tmp_path / f"{i}.safetensors", sd, rank=64, seed=i) for i in range(3)]
    for files, reason in (
        ([inputs, outputs], "has a gain of its outputs and another of its inputs"),
        (large, "the ranks of these LoRAs add up to 192 in unet.*, this server takes 128"),
        ([lokr, other], "a LoKr that is applied by its factors cannot be added to another"),
        ([lokr, outputs], "nor to a DoRA or IA³: use one of them without the other"),
        ([loras[0], broken], f"{broken.id}: .*not finite"),
    ):
        with pytest.raises(UnusableAdapter, match=reason):
            made(base, [(file, 0.5) for file in files])
    fitting = [(large[0], 0.5), (large[1], 0.5), (outputs, 1.0), (large[2], 0.0)]
    assert made(base, fitting).isfinite().all(), "a gain and a weight of 0 take no rank"


def test_composed_adapters_come_and_go_as_others_do(sd: Path, loras: list[AdapterFile]) -> None:
    """They take one slot each, wait in host memory for no file, and are read ahead of the runs that need them."""
    request = RunRequest(run_id="", prompt="a cat", steps=2, width=64, height=64)
    weighted = [as_one([(loras[i], 1.0), (loras[(i + 1) % 5], weight)]) for i in range(5) for weight in (0.5, 1.0)]
    requests = [
        replace(request, run_id=f"{i}", adapter=each.adapter, scale=each.scale) for i, each in enumerate(weighted)
    ]
    with Engine.load(sd, replace(ONE_AT_A_TIME, adapter_slots=3, host_memory=1)) as engine:
        ended = finish(engine, requests)
        assert all(one.image is not None for one in ended.values())
        assert len(engine.measured.loads) == len(requests), "each is read once, however small host memory is"
        assert engine.resident_adapters <= {each.adapter.id for each in weighted if each.adapter is not None}
        assert len(engine.resident_adapters) == 3
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        ((name, model),) = engine.base_models.items()
        ahead = weighted[0].adapter
        assert ahead is not None
        assert engine.preload(ahead, name)
        model.pool.wait_for_loader()
        assert engine.adapters_in_memory == {ahead.id}
        finish(engine, requests[:1])
        assert len(engine.measured.loads) == 1
