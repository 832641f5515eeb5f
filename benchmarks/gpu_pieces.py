"""The pieces that `benchmarks.gpu` measures, each for one model and within ten minutes on a GPU."""

import argparse
import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine import throughput
from benchmarks.engine_models import BenchmarkModel, make_model, wall
from serve_app.engine import AdapterFile, Engine, EngineOptions
from serve_app.engine.device import torch_dtype
from tests.engine.device_checks import Latents, bytes_in_company, furthest, latents_of_both, trace_steps

MODELS = {"sdxl": ("SDXL", 1024, 16), "sd15": ("SD 1.5", 512, 32)}
"""Title, pixels of a side, and the adapters that the goals of its speed ask for."""
HOST_MEMORY = 48 * 2**30
MATRIX_SIDE = {"cuda": 8192, "cpu": 128}
"""The side of the square product that measures the device's matrix speed."""
SWAPS, TRACED, MOST_SLOTS = 20, 5, 2000
FLOAT32_ERROR, BFLOAT16_TIMES = 1e-3, 1.5
"""Latents may be this far from diffusers' float32, as a share of their largest, or this many times as far as diffusers'
own are in the same number type."""


class Setup(NamedTuple):
    """How a piece is measured: on a GPU, or as a rehearsal with tiny models on a CPU."""

    tiny: bool

    @contextmanager
    def model(self, name: str, files: int, *, adapters: int = 0, **options: Any) -> Generator[BenchmarkModel]:
        """Make so many files of adapters, and give them more names where there are to be more `adapters`."""
        device, dtype = ("cpu", "float32") if self.tiny else ("cuda", "bfloat16")
        chosen = {"device": device, "dtype": dtype, "host_memory": HOST_MEMORY, "adapter_slots": 64, **options}
        rank, side = (4, 64) if self.tiny else (32, MODELS[name][1])
        with tempfile.TemporaryDirectory() as into:
            made = make_model(
                name,
                EngineOptions(**dict[str, Any](chosen)),
                Path(into),
                adapters=files,
                rank=rank,
                side=side,
                tiny=self.tiny,
            )
            several = [made.adapters[i % files] for i in range(max(files, adapters))]
            yield made._replace(adapters=[replace(one, id=f"{one.id}-{i}") for i, one in enumerate(several)])

    def few(self, count: int) -> int:
        """Return so many on a GPU, and a few in a rehearsal."""
        return min(count, 4) if self.tiny else count

    def throughput(self, benchmark: BenchmarkModel, distinct: list[int], policies: list[str], solo: int) -> Any:
        threads = torch.get_num_threads()
        args = argparse.Namespace(
            distinct=distinct, jobs=max(distinct), policies=policies, solo=solo, steps=self.few(20),
            repeats=1 if self.tiny else 2, threads=threads, policy_threads=[threads],
        )  # fmt: skip
        return throughput(benchmark, args)


Measure = Callable[[Setup, str], dict[str, Any]]


class Piece(NamedTuple):
    name: str
    what: str
    measure: Measure
    model: str


def machine(setup: Setup, _: str) -> dict[str, Any]:
    """Measure the device's own speeds, and name what runs on it."""
    device = torch.device("cpu" if setup.tiny else "cuda")
    names = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")
    found: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    found |= {"python": platform.python_version(), "system": platform.platform(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "GB": round(card.total_memory / 1e9, 1),
        }
    for dtype in (torch.bfloat16, torch.float32):
        found[f"matrix TFLOP/s, {dtype}"] = round(matrix_speed(device, dtype) / 1e12, 2)
    source = torch.randn(2**30 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), lambda: wall(device)) for _ in range(10))
    return found | {"copy GB/s, read and written": round(2 * source.nbytes / seconds / 1e9, 1)}


def parity(setup: Setup, name: str) -> dict[str, Any]:
    """Compare final latents with diffusers', without an adapter and with one, in float32 and bfloat16."""
    torch.backends.cudnn.allow_tf32 = False
    found: dict[str, Any] = {}
    reference: Latents = {}
    for dtype in ("float32", "bfloat16"):
        with setup.model(name, 1, dtype=dtype) as benchmark, benchmark.engine() as engine:
            requests = [benchmark.requests(1, adapters=n, steps=8, first=n)[0] for n in (0, 1)]
            ours, theirs = latents_of_both(engine, benchmark.pipeline, requests)
        reference = reference or theirs
        for run_id, kind in (("0", "no LoRA"), ("1", "a LoRA")):
            pairs = {"off diffusers": (ours, theirs), "off float32": (ours, reference), "its own": (theirs, reference)}
            one: dict[str, Any] = {what: furthest(a[run_id], b[run_id]) for what, (a, b) in pairs.items()}
            one["holds"] = one["off float32"] <= max(FLOAT32_ERROR, BFLOAT16_TIMES * one["its own"])
            found[f"{dtype}, {kind}"] = one
    return found


def company(setup: Setup, name: str) -> dict[str, Any]:
    """Compare images made in random company with those made alone, in exact mode."""
    with setup.model(name, 8) as benchmark:
        requests = benchmark.requests(12 if setup.tiny else 200, adapters=8, steps=1)
        same, made, rows = bytes_in_company(benchmark.engine, requests)
    return {"same bytes": f"{same} of {made}", "rows of a lone run's pass, by guidance": rows}


def speed(setup: Setup, name: str) -> dict[str, Any]:
    """Measure images a second with many adapters, with one and with none, and the share of the matrix roof."""
    most = setup.few(MODELS[name][2])
    with setup.model(name, most) as benchmark:
        table = setup.throughput(benchmark, [1, most], [], setup.few(8))
        many, own = table[str(most)], table[str(most)]["ours"]["images_per_s"]
        return {
            "images/s": own,
            "kept of no adapters": round(own / many["no adapters"]["images_per_s"], 3),
            "kept of one adapter": round(own / table["1"]["ours"]["images_per_s"], 3),
            "roof": roof(benchmark, own, setup.few(20)),
            "rounds": table,
        }


def over(policy: str, adapters: int, files: int) -> Measure:
    """Measure how many times as fast as another policy."""

    def measure(setup: Setup, name: str) -> dict[str, Any]:
        most = setup.few(adapters)
        with setup.model(name, setup.few(files), adapters=most) as benchmark:
            row = setup.throughput(benchmark, [most], [policy], 0)[str(most)]
        return {"times": row[f"ours / {policy}"]["wall"], "rounds": row}

    return measure


def slots(setup: Setup, name: str) -> dict[str, Any]:
    """Count the adapters that slots hold, and measure the milliseconds from host memory to a slot.

    Some are used one after the other and then once more: the second time none may be copied. Then two take turns in
    the only slot.
    """
    with setup.model(name, 2, adapters=setup.few(64)) as benchmark, torch.inference_mode():
        with benchmark.engine(adapter_slots=MOST_SLOTS) as engine:
            (model,) = engine.base_models.values()
            empty = model.store.size_bytes
            _place(model.pool, benchmark.adapters[0])
            each = model.store.size_bytes - empty
            count = min(MOST_SLOTS, model.store.most_bytes // each)
            placed = benchmark.adapters[:count]
            for file in placed:
                _place(model.pool, file)
            kept = sum(file.id in model.pool.resident for file in placed)
            found: dict[str, Any] = {"slots": count, "MB each": each / 1e6, "placed": len(placed), "kept": kept}
        with benchmark.engine(adapter_slots=1) as engine:
            (model,) = engine.base_models.values()
            for file in benchmark.adapters[:2] * 2:
                _place(model.pool, file)
            turns = [benchmark.adapters[i % 2] for i in range(SWAPS)]
            times = [1e3 * timed(lambda file=file: _place(model.pool, file), benchmark.wall) for file in turns]
    return found | {"to slot ms": round(statistics.median(times), 2), "slowest ms": round(max(times), 2)}


def _place(pool: Any, file: AdapterFile) -> None:
    """Place it in a slot, once it has been read and copied."""
    pool.read_ahead([file])
    while (slot := pool.acquire(file)) is None:
        pool.wait_for_loader()
        time.sleep(1e-4)  # else the thread that copies it would wait for this one
    pool.release(slot)


def trace(setup: Setup, name: str) -> dict[str, Any]:
    """Count what full steps launch, and the gaps between: in the steady state, and when a run gives place to another."""
    with setup.model(name, setup.few(16), exact=False) as benchmark, loaded(benchmark, runs=8) as engine:
        late = iter(benchmark.requests(TRACED, adapters=len(benchmark.adapters), steps=999, first=1000))

        def change() -> None:
            engine.abort(next(iter(engine.progress())))
            engine.add(next(late))
            engine.step()

        median = statistics.median(timed(engine.step, benchmark.wall) for _ in range(setup.few(20)))
        steady = trace_steps(engine.step, benchmark.device, TRACED)
        return {
            "step ms": round(1e3 * median, 2),
            "steady": steady,
            "change": trace_steps(change, benchmark.device, TRACED),
        }


def loaded(benchmark: BenchmarkModel, *, runs: int) -> Engine:
    """Return an engine in the middle of long runs with eight adapters, warm."""
    engine = benchmark.engine()
    for request in benchmark.requests(runs, adapters=min(8, runs), steps=999):
        engine.add(request)
    while min(done for done, _ in engine.progress().values()) < 2:
        engine.step()
    return engine


def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return clock() - began


def roof(benchmark: BenchmarkModel, images_per_s: float, steps: int) -> dict[str, Any]:
    """Return our useful FLOPs as a share of this device's own matrix speed.

    Useful are the denoiser's alone; adapters and padding are not counted.
    """
    best = matrix_speed(benchmark.device, torch_dtype(benchmark.options))
    side = benchmark.side
    with FlopCounterMode(display=False) as counter:
        benchmark.pipeline("x", num_inference_steps=1, width=side, height=side, output_type="latent")
    per_image = steps * sum(counter.get_flop_counts()[type(benchmark.pipeline.unet).__name__].values())
    found = {
        "matrix TFLOP/s": best / 1e12,
        "TFLOP per image": per_image / 1e12,
        "share": images_per_s * per_image / best,
    }
    return {name: round(value, 4) for name, value in found.items()}


def matrix_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs a second of a large square product, the fastest of twenty tries."""
    side = MATRIX_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    products = 10

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b)

    return products * 2 * side**3 / min(timed(multiply, lambda: wall(device)) for _ in range(20))


def _of_each(name: str, what: str, measure: Measure) -> Sequence[Piece]:
    return [Piece(f"{name}-{model}", f"{title}: {what}", measure, model) for model, (title, *_) in MODELS.items()]


PIECES: Sequence[Piece] = (
    Piece("machine", "the device, its clocks and its own speeds, versions", machine, ""),
    *_of_each("bytes", "bytes alone and in company, 200 jobs", company),
    *_of_each("trace", "launches and gaps of a step", trace),
    *_of_each("parity", "latents against diffusers', float32 and bfloat16", parity),
    *_of_each("speed", "images a second with many adapters, one and none (G1 to G4)", speed),
    *_of_each("slots", "adapters in slots, host to slot (G7, G8)", slots),
    *_of_each("one-per-batch", "over one adapter per batch, 64 adapters (G5)", over("one-per-batch", 64, 16)),
    *_of_each("preloaded", "over diffusers per job, 16 adapters preloaded (G6)", over("preloaded", 16, 16)),
)
"""The pieces of the program, the most important first, should the time end before all are measured."""
