"""The pieces that `benchmarks.gpu` measures, each for one model and within a limit of its own on a GPU."""

import argparse
import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine import throughput
from benchmarks.engine_models import BenchmarkModel, make_model, wall
from benchmarks.engine_policies import drive, set_adapters_per_job
from benchmarks.gpu_tables import BACK_ENDS, keep, read
from benchmarks.many_loras_jobs import LORAS, workload
from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from serve_app.engine.batch_invariance import BatchInvariance
from serve_app.engine.device import torch_dtype
from tests.engine.device_checks import (
    Latents,
    bytes_in_company,
    drawn_in_company,
    furthest,
    latents_of_both,
    trace_steps,
    varied,
)


class Shape(NamedTuple):
    title: str
    side: int
    """Pixels."""
    adapters: int
    """How many LoRAs a batch has in the piece that measures speed."""
    steps: int
    guidance: bool


MODELS = {
    "sdxl": Shape("SDXL", 1024, 16, 20, guidance=True),
    "sd15": Shape("SD 1.5", 512, 32, 20, guidance=True),
    "z-image": Shape("Z-Image", 1024, 16, 8, guidance=False),
    "klein": Shape("klein", 1024, 16, 4, guidance=False),
}
UNETS = ("sdxl", "sd15")
FILES = 4
"""Files of adapters that are made; more adapters are the same ones under other names."""
HOST_MEMORY = 48 * 2**30
MATRIX_SIDE = {"cuda": 8192, "cpu": 128}
"""The side of the square product that measures the device's matrix speed."""
SWAPS, TRACED, MOST_SLOTS, MOST_BYTES = 20, 5, 2000, 400
FLOAT32_ERROR, BFLOAT16_TIMES = 1e-3, 1.5
"""Latents may be this far from diffusers' float32, as a share of their largest, or this many times as far as diffusers'
own are in the same number type."""


class Skipped(Exception):
    """A piece needs what this engine does not have yet; its text names it."""


class Setup(NamedTuple):
    """How a piece is measured: on a GPU, or as a rehearsal with tiny models on a CPU."""

    tiny: bool
    file: Path
    """The record."""
    piece: str
    until: float
    """The time of `time.monotonic` at which its process is ended."""

    def keep(self, found: dict[str, Any], **more: Any) -> None:
        """Write what is known, so that a process that is cut has not worked for nothing."""
        keep(self.file, self.piece, {"found": found, **(more or {"failure": "cut at its limit"})})

    @contextmanager
    def model(self, name: str, files: int = FILES, *, adapters: int = 0, **options: Any) -> Generator[BenchmarkModel]:
        """Make this many files of adapters, and give them more names where there are to be more `adapters`."""
        device, dtype = ("cpu", "float32") if self.tiny else ("cuda", "bfloat16")
        chosen = {"device": device, "dtype": dtype, "host_memory": HOST_MEMORY, "adapter_slots": 64, **options}
        if self.tiny:
            chosen["max_rows"] = 4
        elif not MODELS[name].guidance:
            chosen = {"max_runs": 16, **chosen}  # so that runs of one row fill the widest pass
        rank, side = (4, 64) if self.tiny else (32, MODELS[name].side)
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder)
            made = make_model(
                name,
                EngineOptions(**dict[str, Any](chosen)),
                into,
                adapters=files,
                rank=rank,
                side=side,
                tiny=self.tiny,
            )
            several = [made.adapters[i % files] for i in range(max(files, adapters))]
            adapted = [replace(one, id=f"{one.id}-{i}") for i, one in enumerate(several)]
            yield made._replace(adapters=adapted, findings=into)

    def requests(self, benchmark: BenchmarkModel, count: int, adapters: int) -> list[RunRequest]:
        """Return runs of the model's usual steps; a distilled transformer has no guidance."""
        shape = MODELS[benchmark.name]
        made = benchmark.requests(count, adapters=adapters, steps=self.few(shape.steps))
        return made if shape.guidance else [replace(one, guidance=1.0) for one in made]

    def few(self, count: int) -> int:
        """Return the number on a GPU, and a few in a rehearsal."""
        return min(count, 2) if self.tiny else count


Measure = Callable[[Setup, str], dict[str, Any]]


class Piece(NamedTuple):
    name: str
    what: str
    measure: Measure
    model: str
    limit_s: int
    """Its process is ended after this time."""


def machine(setup: Setup, _: str) -> dict[str, Any]:
    """Measure the device's own speeds, and name what runs on it."""
    device = torch.device("cpu" if setup.tiny else "cuda")
    names = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")
    found: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    found |= {"python": platform.python_version(), "system": platform.platform(), "cuda": torch.version.cuda}
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
    """Compare images made in random company with those made alone, in exact mode, for as long as the piece may take."""
    with setup.model(name, adapters=8) as benchmark:
        most, until = (12, setup.until) if setup.tiny else (MOST_BYTES, setup.until - 3)
        return bytes_in_company(benchmark.engine, draw_from(benchmark), most, until=until, tell=setup.keep)


def draw_from(benchmark: BenchmarkModel) -> Callable[[int], RunRequest]:
    """Return what makes the n-th of the benchmark's varied requests."""
    (plain,) = benchmark.requests(1, adapters=0, steps=1)
    with benchmark.engine() as engine:
        (model,) = engine.base_models.values()
    return partial(varied, plain=plain, files=benchmark.adapters, family=model.family)


def restart(setup: Setup, name: str) -> dict[str, Any]:
    """Draw in this process what `bytes` drew in another, and compare."""
    digests: list[str] = read(setup.file).get(f"bytes-{name}", {}).get("found", {}).get("digests", [])
    if not digests:
        raise Skipped(f"bytes-{name} has drawn nothing yet")
    with setup.model(name, adapters=8) as benchmark, benchmark.engine() as engine:
        drawn = drawn_in_company(engine, draw_from(benchmark), len(digests), setup.until)
    return {"same bytes": f"{sum(drawn[f'{i}'] == digest for i, digest in enumerate(digests))} of {len(digests)}"}


def speed(setup: Setup, name: str, precision: str = "") -> dict[str, Any]:
    """Measure images a second with many LoRAs, one and none, a lone image, and a trace of a step, in exact mode."""
    shape, found = MODELS[name], dict[str, Any]()
    many = setup.few(shape.adapters)
    began = time.monotonic()
    with setup.model(name, adapters=many) as made, (benchmark := made._replace(precision=precision)).engine() as engine:
        found["s to an engine"] = round(time.monotonic() - began, 1)
        for adapters, told, rounds in ((many, f"{shape.adapters} LoRAs", 2), (0, "no LoRAs", 2), (1, "1 LoRA", 1)):
            _warm_up(engine, setup.requests(benchmark, many, adapters))
            found.setdefault("s to the first images", round(time.monotonic() - began, 1))
            found[told] = _images_a_second(engine, setup.requests(benchmark, many, adapters), rounds)
            setup.keep(found)
        most, none = (found[told]["images/s"] for told in (f"{shape.adapters} LoRAs", "no LoRAs"))
        found["kept of no LoRAs"] = round(most / none, 3)
        _warm_up(engine, setup.requests(benchmark, 1, 1))
        found["a lone image s"] = round(drive(engine, setup.requests(benchmark, 1, 1)).wall_s, 2)
        if name in UNETS:
            found["roof"] = roof(benchmark, most, setup.few(shape.steps))
        setup.keep(found)
        return found | _trace(setup, benchmark, engine)


def shapes(setup: Setup, name: str) -> dict[str, Any]:
    """Time a step of the widest batch in passes of other numbers of rows than the engine chooses."""
    found, chosen = dict[str, Any](), "_rows_of_pass"
    with setup.model(name, adapters=16) as made:
        for rows in (1, 2, 4, 8, 16):
            setattr(BatchInvariance, chosen, lambda *_, rows=rows: rows)  # of this process alone
            with made._replace(findings=None).engine() as engine:
                requests = [replace(one, steps=99) for one in setup.requests(made, engine.options.runs, 16)]
                for request in requests:
                    engine.add(request)
                while len(engine.progress()) < len(requests) or min(done for done, _ in engine.progress().values()) < 3:
                    engine.step()
                found[f"ms in passes of {rows}"] = round(1e3 * min(timed(engine.step, made.wall) for _ in range(4)), 1)
            setup.keep(found)
    return found


def _warm_up(engine: Engine, requests: Sequence[RunRequest]) -> None:
    """Make graphs and fill slots before the clock runs."""
    drive(engine, [replace(one, steps=3) for one in requests])


def _images_a_second(engine: Engine, requests: Sequence[RunRequest], rounds: int) -> dict[str, Any]:
    speeds = [len(requests) / drive(engine, requests).wall_s for _ in range(rounds)]
    return {"images/s": round(statistics.mean(speeds), 3), "rounds": [round(each, 3) for each in speeds]}


def partial_guidance(setup: Setup, name: str) -> dict[str, Any]:
    """Measure images a second with guidance over all of the steps, and over the first half of them."""
    _need(RunRequest, "guidance_start", "guidance_end")
    found, many = dict[str, Any](), setup.few(16)
    with setup.model(name, adapters=many, max_runs=16) as benchmark, benchmark.engine() as engine:
        requests = setup.requests(benchmark, many, many)
        for told, end in (("half", 0.5), ("whole", 1.0)):
            within = [replace(one, **dict[str, Any](guidance_end=end)) for one in requests]
            _warm_up(engine, within)
            found[told] = _images_a_second(engine, within, rounds=1)
            setup.keep(found)
    return found | {"times": round(found["half"]["images/s"] / found["whole"]["images/s"], 3)}


def fp8(setup: Setup, name: str) -> dict[str, Any]:
    """Measure as `speed` does, with products in FP8."""
    return speed(setup, name, precision="fp8")


def _need(options: type[Any], *names: str) -> None:
    if missing := [name for name in names if name not in {each.name for each in fields(options)}]:
        raise Skipped(f"{options.__name__} has no {' and '.join(missing)} yet")


ATTENTION = {
    "SDXL 64²": (10, 4096, 4096, 64, False),
    "SDXL 32²": (20, 1024, 1024, 64, False),
    "SDXL 32², text": (20, 1024, 77, 64, False),
    "SD 1.5 64²": (8, 4096, 4096, 40, False),
    "Z-Image": (30, 4352, 4352, 128, True),
    "klein": (24, 4608, 4608, 128, False),
}
"""Heads, queries, keys, the width of a head, and whether a mask hides keys."""


def attention(setup: Setup, _: str) -> dict[str, Any]:
    """Time torch's back ends of attention on 16 rows, and find the row counts at which rows have the same bits."""
    device, dtype = (torch.device("cpu"), torch.float32) if setup.tiny else (torch.device("cuda"), torch.bfloat16)
    found: dict[str, Any] = {"cuDNN": torch.backends.cudnn.version()}
    shapes: dict[str, Any] = {}
    for told, (heads, queries, keys, width, is_masked) in ATTENTION.items():
        heads, *sides = (min(side, 32) if setup.tiny else side for side in (heads, queries, keys, keys))
        q, k, v = (torch.randn(16, side, heads, width, device=device, dtype=dtype).transpose(1, 2) for side in sides)
        seen = torch.arange(sides[1], device=device) >= torch.arange(16, device=device)[:, None]
        bias = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill(~seen, float("-inf"))[:, None, None]

        def attend(rows: slice, q: Any = q, k: Any = k, v: Any = v, bias: Any = bias if is_masked else None) -> Any:
            return F.scaled_dot_product_attention(
                q[rows], k[rows], v[rows], attn_mask=None if bias is None else bias[rows]
            )

        shapes[told] = {back_end: _attended(setup, attend, device, back_end) for back_end in BACK_ENDS}
        setup.keep(found | {"shapes": shapes})
    return found | {"shapes": shapes}


def _attended(setup: Setup, attend: Callable[[slice], torch.Tensor], device: torch.device, back_end: str) -> Any:
    clock = partial(wall, device)
    with sdpa_kernel(getattr(SDPBackend, back_end)), torch.inference_mode():
        try:
            first = timed(lambda: attend(slice(16)), clock)
            whole = attend(slice(16))
            ms = 1e3 * min(timed(lambda: attend(slice(16)), clock) for _ in range(setup.few(10)))
            same = [
                rows
                for rows in (1, 2, 4, 8)
                if all(torch.equal(attend(slice(i, i + rows)), whole[i : i + rows]) for i in range(0, 16, rows))
            ]
        except RuntimeError as error:
            return {"refused": str(error).splitlines()[0]}
    return {"ms": round(ms, 3), "first ms": round(1e3 * first, 1), "same bits at rows": same}


def many_loras(setup: Setup, name: str) -> dict[str, Any]:
    """Draw the jobs of the many-LoRA benchmark, by the engine and by diffusers with every LoRA loaded; no HTTP."""
    jobs = workload(setup.few(64))
    found: dict[str, Any] = {"jobs": len(jobs)}
    with setup.model(name, adapters=setup.few(LORAS)) as benchmark:
        files = benchmark.adapters
        requests = [
            RunRequest(
                run_id=f"{job.number}", prompt=job.prompt, adapter=files[job.lora % len(files)], scale=job.weight,
                seed=job.number, steps=setup.few(job.steps), width=64 if setup.tiny else job.width,
                height=64 if setup.tiny else job.height,
            )
            for job in jobs
        ]  # fmt: skip
        with benchmark.engine() as engine:
            drive(engine, [replace(one, steps=2) for one in requests])
            found["images/s"] = round(len(jobs) / drive(engine, requests).wall_s, 3)
        setup.keep(found)
        theirs = set_adapters_per_job(benchmark)
        theirs(requests[:1])
        found["diffusers' images/s"] = round(len(jobs) / theirs(requests).wall_s, 3)
    return found


def over(policy: str, adapters: int) -> Measure:
    """Measure how many times as fast as another policy, with images enough to fill its batches and ours."""

    def measure(setup: Setup, name: str) -> dict[str, Any]:
        many, threads = setup.few(adapters), torch.get_num_threads()
        with setup.model(name, adapters=many) as benchmark:
            args = argparse.Namespace(
                distinct=[many], jobs=setup.few(16), policies=[policy], solo=0, steps=setup.few(20), repeats=1,
                threads=threads, policy_threads=[threads],
            )  # fmt: skip
            row = throughput(benchmark, args)[str(many)]
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


def _trace(setup: Setup, benchmark: BenchmarkModel, engine: Engine) -> dict[str, Any]:
    """Count what full steps launch, and the gaps between: in the steady state, and when a run takes another's place."""
    runs = engine.options.runs
    long = [replace(one, steps=999) for one in setup.requests(benchmark, runs + TRACED, len(benchmark.adapters))]
    late = iter(long[runs:])
    for request in long[:runs]:
        engine.add(request)
    while min(done for done, _ in engine.progress().values()) < 2:
        engine.step()

    def change() -> None:
        engine.abort(next(iter(engine.progress())))
        engine.add(next(late))
        engine.step()

    median = statistics.median(timed(engine.step, benchmark.wall) for _ in range(setup.few(20)))
    return {
        "step ms": round(1e3 * median, 2),
        "steady": trace_steps(engine.step, benchmark.device, setup.few(TRACED)),
        "change": trace_steps(change, benchmark.device, setup.few(TRACED)),
    }


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


def _piece(kind: str, model: str, what: str, measure: Measure, limit_s: int) -> Piece:
    return Piece(f"{kind}-{model}", f"{MODELS[model].title}: {what}", measure, model, limit_s)


_SAME = "bytes alone and in company: 16 rows, several LoRAs, begun from images"
PIECES: Sequence[Piece] = (
    _piece("bytes", "sdxl", _SAME, company, 100),
    _piece("bytes", "sd15", _SAME, company, 55),
    _piece("bytes", "z-image", _SAME, company, 90),
    _piece("bytes", "klein", _SAME, company, 80),
    _piece("speed", "sdxl", "images a second with 16 LoRAs, one and none; a trace of a step", speed, 140),
    _piece("shapes", "sdxl", "a step in passes of 1, 2, 4, 8 and 16 rows", shapes, 100),
    Piece("attention", "back ends: ms, and the row counts that keep bits", attention, "", 40),
    _piece("guidance", "sdxl", "guidance over half of the steps", partial_guidance, 80),
    _piece("restart", "sdxl", "the first of its images again, in another process", restart, 60),
    _piece("fp8", "sdxl", "images a second in FP8", fp8, 140),
    _piece("speed", "z-image", "images a second with 16 LoRAs, one and none", speed, 120),
    _piece("speed", "klein", "images a second with 16 LoRAs, one and none", speed, 100),
    _piece("compiled", "sdxl", "over diffusers compiled, one LoRA fused, batches of 8", over("compiled", 1), 240),
    _piece("one-per-batch", "sdxl", "over one LoRA per batch, 64 LoRAs", over("one-per-batch", 64), 240),
    _piece("preloaded", "sdxl", "over diffusers per job, 16 LoRAs loaded", over("preloaded", 16), 150),
    _piece("load-per-job", "sdxl", "over diffusers that loads each job's LoRA", over("load-per-job", 16), 150),
    _piece("slots", "sdxl", "LoRAs in slots, host to slot", slots, 90),
    _piece("many-loras", "sd15", "64 jobs for 64 LoRAs", many_loras, 200),
    _piece("slots", "sd15", "LoRAs in slots, host to slot", slots, 60),
    _piece("speed", "sd15", "images a second with 32 LoRAs, one and none", speed, 90),
    Piece("machine", "the device's own speeds, and versions", machine, "", 40),
    _piece("parity", "sdxl", "latents against diffusers', float32 and bfloat16", parity, 150),
    _piece("parity", "sd15", "latents against diffusers', float32 and bfloat16", parity, 90),
)
"""The pieces of the program in order of what is unknown, should the time end before all are measured."""
