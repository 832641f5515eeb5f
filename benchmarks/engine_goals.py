"""The design's goals for a GPU, G1 to G8, from the throughput table and four measures of their own; on a CPU a rehearsal."""

import argparse
import gc
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine_subjects import Subject
from serve_app.engine import AdapterFile

MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
"""Of the square product that measures the device's matrix speed."""
SWAPS = 20


def goals(subject: Subject, table: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    most = max(table, key=int)
    row, own = table[most], table[most]["ours"]["images_per_s"]
    speed = {"sdxl": "G1", "sd15": "G2"}.get(subject.name, "speed")
    found: dict[str, Any] = {
        f"{speed} images/s": own,
        "adapters": int(most),
        "G3 kept of no adapters": round(own / row["no adapters"]["images_per_s"], 3),
    }
    if "1" in table and most != "1":
        found["G4 kept of one adapter"] = round(own / table["1"]["ours"]["images_per_s"], 3)
    for goal, rival in (("G5", "B2"), ("G6", "B1")):
        if f"ours / {rival}" in row:
            found[f"{goal} over {rival}"] = row[f"ours / {rival}"]["wall"]
    free(subject)
    found["G7"] = resident_adapters(subject, args.resident)
    free(subject)
    found["G8 ms"] = host_to_slot(subject)
    free(subject)
    found["roof"] = roof(subject, own, args.steps)
    return found


def resident_adapters(subject: Subject, most: int) -> dict[str, Any]:
    """How many adapters the slots hold by the memory they are given, and whether `most` of them, one after the other and then
    once more, are really there: the second time none may be copied."""
    engine = subject.engine(adapter_slots=100_000)
    (model,) = engine.base_models.values()
    files = [AdapterFile(f"{subject.adapters[0].id}-{i}", subject.adapters[0].path) for i in range(most)]
    with engine, torch.inference_mode():
        _place(model.pool, files[0])
        slots = next(iter(model.banks.values())).slots - 1
        files = files[:slots]
        for file in files:
            _place(model.pool, file)
        kept = sum(file.id in model.pool.resident for file in files)
        size = sum(bank.layout.size for bank in model.banks.values()) * subject.options.torch_dtype.itemsize
        return {"slots": slots, "megabytes each": round(size / 1e6, 1), "placed": len(files), "kept": kept}


def host_to_slot(subject: Subject) -> dict[str, float]:
    """Two adapters in host memory take turns in the only slot: the time until the device holds the next one."""
    engine = subject.engine(adapter_slots=1, host_memory=64 * 2**30)
    (model,) = engine.base_models.values()
    with engine, torch.inference_mode():
        for file in subject.adapters[:2] * 2:
            _place(model.pool, file)
        times: list[float] = []
        for i in range(SWAPS):
            began = subject.wall()
            slot = model.pool.acquire(subject.adapters[i % 2])
            times.append((subject.wall() - began) * 1e3)
            assert slot is not None
            model.pool.release(slot)
    return {"median": round(statistics.median(times), 2), "slowest": round(max(times), 2)}


def roof(subject: Subject, images_per_s: float, steps: int) -> dict[str, Any]:
    """Our useful FLOPs (the denoiser's alone; adapters and padding not counted) as a share of this device's own matrix speed."""
    side = MATRIX_SIDE[subject.options.torch_device.type]
    a, b = (
        torch.randn(side, side, device=subject.options.torch_device, dtype=subject.options.torch_dtype)
        for _ in range(2)
    )
    best = 0.0
    for _ in range(20):
        began = subject.wall()
        for _ in range(10):
            torch.mm(a, b)
        best = max(best, 10 * 2 * side**3 / (subject.wall() - began))
    with FlopCounterMode(display=False) as counter:
        subject.pipeline("x", num_inference_steps=1, width=subject.side, height=subject.side, output_type="latent")
    unet = counter.get_flop_counts()[type(subject.pipeline.unet).__name__]
    per_image = sum(unet.values()) * steps
    return {
        "matrix TFLOP/s": round(best / 1e12, 3),
        "TFLOP per image": round(per_image / 1e12, 4),
        "share": round(images_per_s * per_image / best, 3),
    }


def free(subject: Subject) -> None:
    """Engines that nobody holds any more give their memory back."""
    gc.collect()
    if subject.options.torch_device.type == "cuda":
        torch.cuda.empty_cache()


def _place(pool: Any, file: AdapterFile) -> None:
    """Into a slot, however often it has to be read or packed first."""
    while (slot := pool.acquire(file)) is None:
        pool.wait_for_loader()
    pool.release(slot)
