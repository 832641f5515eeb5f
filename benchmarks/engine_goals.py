"""Measures the figures that have goals on a GPU; on a CPU it is a rehearsal."""

import argparse
import gc
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine_models import BenchmarkModel
from serve_app.engine import AdapterFile
from serve_app.engine.device import torch_device, torch_dtype

MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
"""The side of the square product that measures the device's matrix speed."""
SWAPS = 20


def goals(benchmark: BenchmarkModel, table: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    most = max(table, key=int)
    row, own = table[most], table[most]["ours"]["images_per_s"]
    found: dict[str, Any] = {
        "images/s": own,
        "adapters": int(most),
        "kept of no adapters": round(own / row["no adapters"]["images_per_s"], 3),
    }
    if "1" in table and most != "1":
        found["kept of one adapter"] = round(own / table["1"]["ours"]["images_per_s"], 3)
    for policy in ("one-per-batch", "preloaded"):
        if f"ours / {policy}" in row:
            found[f"over {policy}"] = row[f"ours / {policy}"]["wall"]
    free(benchmark)
    found["resident adapters"] = resident_adapters(benchmark, args.resident)
    free(benchmark)
    found["host to slot ms"] = host_to_slot(benchmark)
    free(benchmark)
    found["roofline"] = roofline(benchmark, own, args.steps)
    return found


def resident_adapters(benchmark: BenchmarkModel, most: int) -> dict[str, Any]:
    """Count the adapters that the slots' memory holds, and check that `most` of them really fit.

    They are used one after the other and then once more: the second time none may be copied.
    """
    engine = benchmark.engine(adapter_slots=100_000)
    (model,) = engine.base_models.values()
    files = [AdapterFile(f"{benchmark.adapters[0].id}-{i}", benchmark.adapters[0].path) for i in range(most)]
    with engine, torch.inference_mode():
        _place(model.pool, files[0])
        slots = next(iter(model.component_slots.values())).count - 1
        files = files[:slots]
        for file in files:
            _place(model.pool, file)
        kept = sum(file.id in model.pool.resident for file in files)
        size = (
            sum(adapter_slots.layout.size for adapter_slots in model.component_slots.values())
            * torch_dtype(benchmark.options).itemsize
        )
        return {"slots": slots, "megabytes each": round(size / 1e6, 1), "placed": len(files), "kept": kept}


def host_to_slot(benchmark: BenchmarkModel) -> dict[str, float]:
    """Measure the time from a request for an adapter in host memory until the device holds it.

    Two adapters take turns in the only slot.
    """
    engine = benchmark.engine(adapter_slots=1, host_memory=64 * 2**30)
    (model,) = engine.base_models.values()
    with engine, torch.inference_mode():
        for file in benchmark.adapters[:2] * 2:
            _place(model.pool, file)
        times: list[float] = []
        for i in range(SWAPS):
            began = benchmark.wall()
            slot = model.pool.acquire(benchmark.adapters[i % 2])
            times.append((benchmark.wall() - began) * 1e3)
            assert slot is not None
            model.pool.release(slot)
    return {"median": round(statistics.median(times), 2), "slowest": round(max(times), 2)}


def roofline(benchmark: BenchmarkModel, images_per_s: float, steps: int) -> dict[str, Any]:
    """Return our useful FLOPs as a share of this device's own matrix speed.

    Useful are the denoiser's alone; adapters and padding are not counted.
    """
    side = MATRIX_SIDE[torch_device(benchmark.options).type]
    a, b = (
        torch.randn(side, side, device=torch_device(benchmark.options), dtype=torch_dtype(benchmark.options))
        for _ in range(2)
    )
    best = 0.0
    for _ in range(20):
        began = benchmark.wall()
        for _ in range(10):
            torch.mm(a, b)
        best = max(best, 10 * 2 * side**3 / (benchmark.wall() - began))
    with FlopCounterMode(display=False) as counter:
        benchmark.pipeline(
            "x", num_inference_steps=1, width=benchmark.side, height=benchmark.side, output_type="latent"
        )
    unet = counter.get_flop_counts()[type(benchmark.pipeline.unet).__name__]
    per_image = sum(unet.values()) * steps
    return {
        "matrix TFLOP/s": round(best / 1e12, 3),
        "TFLOP per image": round(per_image / 1e12, 4),
        "share": round(images_per_s * per_image / best, 3),
    }


def free(benchmark: BenchmarkModel) -> None:
    """Engines that nobody holds any more give their memory back."""
    gc.collect()
    if torch_device(benchmark.options).type == "cuda":
        torch.cuda.empty_cache()


def _place(pool: Any, file: AdapterFile) -> None:
    """Into a slot, however often it has to be read or packed first."""
    while (slot := pool.acquire(file)) is None:
        pool.wait_for_loader()
    pool.release(slot)
