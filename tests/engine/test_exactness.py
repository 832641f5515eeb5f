"""A run gives the same bytes, or the same failure, alone and in any company, whatever any of them asks for."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from serve_app.domain.families import UNET_SAMPLERS as SAMPLERS
from serve_app.domain.samplers import spacings_of
from serve_app.engine import AdapterFile, Checkpoint, Engine, Finished, RunRequest, as_one
from serve_app.engine.run import Applied
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import begun_at_random, finish

OPTIONS = replace(EXACT_FLOAT32, max_rows=8, max_runs=6, adapter_slots=7, host_memory=2**20)
"""The slots and host memory hold fewer adapters than are drawn, so that some always leave and come back."""
SIZES = ((64, 64), (96, 64), (60, 72))
LINEARS = (*tiny_models.ATTENTION, "ff.net.2", "proj_in")
COMPOSED = (((0, 0.5), (1, -1.0)), ((2, 1.0), (3, 0.5), (8, 1.0), (10, 0.75)), ((5, 1.5), (7, 0.3)),
            ((13, 1.0), (6, 0.5), (15, 2.0)), ((12, 0.8), (14, -0.5), (4, 1.0)), ((3, 0.5), (2, 2.0)),
            ((16, 1.0), (2, 0.5)), ((0, -0.5), (17, 1.0), (15, 1.0)),
            ((16, 1.0), (18, 1.0)), ((7, 1.0), (12, 1.0)), ((0, 1.0), (-1, 1.0)))  # fmt: skip
"""Adapters that act as one, by their number, with weights; the last three cannot be added, and are not all there."""
NAMES = [sampler if spacing is None else f"{sampler}-{spacing}"
         for sampler in SAMPLERS for spacing in (None, *spacings_of(sampler))]  # fmt: skip
"""Every sampler with every spacing that it takes."""
FRESH_EVERY = 200
"""After this many runs the engine that makes them one at a time is replaced by a new one."""

pytestmark = pytest.mark.slow


class Kind(NamedTuple):
    """A kind of adapter: the low-rank form that it is written in, and its gain."""

    form: str
    rank: int
    gain: str = ""
    targets: tuple[str, ...] = LINEARS
    text: bool = False


KINDS = (
    Kind("lora", 4, targets=tiny_models.ATTENTION),
    Kind("lora", 16, text=True),
    Kind("lora", 24, targets=tiny_models.EVERYTHING),
    Kind("lora", 40, targets=tiny_models.EVERYTHING, text=True),
    Kind("lora", 8, targets=("conv1", "conv2", "conv_shortcut")),
    Kind("lora", 8, "magnitude", text=True),
    Kind("lora", 20, "magnitude", tiny_models.EVERYTHING),
    Kind("lora", 12, "outputs", text=True),
    Kind("lora", 6, "inputs", tiny_models.EVERYTHING, text=True),
    Kind("loha", 2),
    Kind("loha", 3, "outputs"),
    Kind("lokr", 2),
    Kind("lokr", 3, "inputs"),
    Kind("ia3", 0, "outputs"),
    Kind("ia3", 0, "inputs"),
    Kind("lora", 4, targets=(), text=True),
    Kind("whole", 4),
    Kind("whole", 8, "outputs", (*LINEARS, "proj_out")),
    Kind("whole", 8, "inputs"),
)
"""Every form and gain, ranks of every bucket that the tiny layers have, layers of every kind, text encoders alone."""


def write(path: Path, base: Path, kind: Kind, seed: int) -> AdapterFile:
    if kind.form == "lora" and kind.gain in ("", "magnitude"):
        return tiny_models.write_lora(
            path, base, rank=kind.rank, seed=seed, size=0.05, targets=kind.targets or ("none",), text=kind.text,
            dora=kind.gain == "magnitude",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    shapes = tiny_models.random_lora(base, rank=1, seed=0, targets=kind.targets, text=kind.text)
    for name, up in shapes.items():
        if name.endswith("lora_B.weight"):
            component, _, layer = name.removesuffix(".lora_B.weight").partition(".")
            prefix, inner = ("lora_unet", layer) if component == "unet" else ("lora_te", "text_model." + layer)
            down = shapes[name.replace("lora_B", "lora_A")]
            parts = _parts(kind, (up.shape[0], *down.shape[1:]), generator)
            tensors |= {f"{prefix}_{inner.replace('.', '_')}.{part}": numbers for part, numbers in parts.items()}
    return tiny_models.write_adapter(path, tensors)


def _parts(kind: Kind, shape: tuple[int, ...], generator: torch.Generator) -> Mapping[str, Tensor]:
    def draw(*sides: int, size: float = 0.05) -> Tensor:
        return torch.randn(sides, generator=generator) * size

    out, into, *kernel = shape
    rank = kind.rank
    match kind.form:
        case "loha":
            parts = {f"hada_w{i}_{part}": draw(*sides, size=0.3) for i in (1, 2)
                     for part, sides in (("a", (out, rank)), ("b", (rank, into)))}  # fmt: skip
        case "lokr":
            parts = {"lokr_w1": draw(4, 4, size=0.3), "lokr_w2_a": draw(out // 4, rank, size=0.3),
                     "lokr_w2_b": draw(rank, into // 4, size=0.3)}  # fmt: skip
        case "whole":
            parts = {"lokr_w1": draw(rank, rank, size=0.2), "lokr_w2": draw(out // rank, into // rank, size=0.2)}
        case "ia3":
            on_input = kind.gain == "inputs"
            return {"weight": draw(into if on_input else out), "on_input": torch.tensor(on_input)}
        case _:
            parts = {
                "lora_down.weight": draw(rank, into, *kernel),
                "lora_up.weight": draw(out, rank, *(1 for _ in kernel)),
            }
    if kind.gain:
        ones = [1] * len(kernel)
        sides = (1, into, *ones) if kind.gain == "inputs" else (out, 1, *ones)
        parts["dora_scale"] = torch.rand(sides, generator=generator) * 0.4 + 0.4
    return parts | {"alpha": torch.tensor(float(rank))}


def adapters(base: Path, into: Path) -> list[AdapterFile]:
    """Write adapters of every kind; the last three explode, are no numbers, and are not there."""
    good = [write(into / f"{i}.safetensors", base, kind, i) for i, kind in enumerate(KINDS)]
    exploding = tiny_models.write_lora(into / "exploding.safetensors", base, rank=4, seed=1, size=1e19)
    tensors = tiny_models.random_lora(base, rank=4, seed=1)
    numberless = {name: tensor * float("nan") for name, tensor in tensors.items()}
    return [*good, exploding, tiny_models.write_adapter(into / "nan.safetensors", numberless),
            AdapterFile("gone", into / "gone.safetensors")]  # fmt: skip


def random_request(chance: random.Random, run_id: str, files: list[AdapterFile]) -> RunRequest:
    """Draw any of the things that a run may differ in from the runs beside it."""
    width, height = chance.choice(SIZES)
    alone = Applied(chance.choice([None, *files[:-3] * 2, *files[-3:]]), chance.choice([0.0, 0.1, 0.75, 1.0, 2.0]))
    composed = as_one((files[i], weight) for i, weight in chance.choice([*COMPOSED[:-3] * 3, *COMPOSED[-3:]]))
    applied = chance.choice([alone, alone, composed])
    request = RunRequest(
        run_id=run_id,
        prompt=" ".join(chance.choices(["red", "cat", "on", "a", "mat"], k=chance.choice([1, 3, 12]))),
        negative_prompt=chance.choice(["", "dull", "dull and grey and much too long"]),
        adapter=applied.adapter,
        scale=applied.scale,
        seed=chance.getrandbits(64),
        steps=chance.randint(1, 5),
        guidance=chance.choice([0.0, 1.0, 4.0, 7.5]),
        guidance_start=chance.choice([0.0, 0.0, 0.25, 0.5]),
        guidance_end=chance.choice([0.6, 0.8, 1.0]),
        width=width,
        height=height,
        base_model=chance.choice(["plain", "float8"]),
        sampler=chance.choice([None, *NAMES]),
    )
    return begun_at_random(request, chance)


def outcome(ended: Finished) -> str:
    return str(ended.failure) if ended.image is None else hashlib.sha256(ended.image.tobytes()).hexdigest()


def in_company(engine: Engine, chance: random.Random, requests: list[RunRequest]) -> dict[str, str]:
    """Return the outcomes of runs that join, and sometimes are aborted, between any two steps of the others.

    Each ends once, whatever the order, and slots, runs and what is told of them stay within their bounds.
    """
    together: dict[str, str] = {}
    waiting, live = requests[::-1], set[str]()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), chance.randint(0, 4))):
            live.add(waiting[-1].run_id)
            engine.add(waiting.pop())
        if live and chance.random() < 0.1:
            begun = {run_id for run_id, (done, _) in engine.progress().items() if done}
            leaving = chance.choice(sorted(chance.choice((live, begun or live))))
            assert engine.abort(leaving)
            live.remove(leaving)
        for one in engine.step():
            live.remove(one.run_id)  # KeyError: it ended twice, or after it was aborted
            together[one.run_id] = outcome(one)
        assert engine.progress().keys() == live
        assert 0 <= engine.free_runs <= OPTIONS.runs
        assert len(engine.scheduler) <= OPTIONS.runs
        assert all(len(model.pool.resident) <= OPTIONS.adapter_slots for model in engine.base_models.values())
    assert not live
    return together


def one_by_one(
    sources: Mapping[str, Checkpoint], findings: Path, requests: list[RunRequest]
) -> Iterator[tuple[str, str]]:
    for first in range(0, len(requests), FRESH_EVERY):
        with Engine.load(sources, OPTIONS, findings=findings) as engine:
            for request in requests[first : first + FRESH_EVERY]:
                yield request.run_id, outcome(finish(engine, [request])[request.run_id])


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("two_lanes")
@pytest.mark.parametrize(("model", "runs"), [("small_sd", 40), pytest.param("sd", 1130, marks=pytest.mark.soak)])
def test_runs_keep_their_bytes_in_any_company(
    model: str, runs: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base: Path = request.getfixturevalue(model)
    chance, files = random.Random(runs), adapters(base, tmp_path / "adapters")
    requests = [random_request(chance, f"{i}", files) for i in range(runs)]
    sources = {
        "plain": Checkpoint(base),
        "float8": Checkpoint(base, clip_skip=1, precision="fp8"),
    }
    with Engine.load(sources, OPTIONS, findings=tmp_path) as engine:
        together = in_company(engine, chance, requests)
    alone = dict(one_by_one(sources, tmp_path, [each for each in requests if each.run_id in together]))
    differing = {run_id: requests[int(run_id)] for run_id in alone if alone[run_id] != together[run_id]}
    assert not differing, [(each, alone[run_id], together[run_id]) for run_id, each in differing.items()]
    images = sum(len(each) == 64 for each in alone.values())
    print(f"\n{len(alone)} runs keep their bytes in any company: {images} images, {len(alone) - images} failures")  # noqa: T201 - with `-s`
    assert images > 0.7 * len(alone)
