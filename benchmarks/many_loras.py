"""Measures a server of images under many LoRAs, by the rules of `many-loras.md`; any server, through a small adapter.

    python -m benchmarks.many_loras diffusers --processes 2 --threads 1 --out diffusers.json
    python -m benchmarks.many_loras atelier --reference diffusers.json --out atelier.json      # starts `atelier up`
    python -m benchmarks.many_loras openai --url http://gpu:8000/v1 --model sdxl --folder loras/ \\
        --lora '{"lora": {"name": "{name}", "local_path": "{path}", "scale": {weight}}}'

Jobs come all at once, or with `--rate` as Poisson arrivals. Writes JSON with every latency and picture's digest, and
pictures beside it, and prints a row for a table.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import multiprocessing
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.many_loras_jobs import GUIDANCE, LORAS, Job, workload
from benchmarks.serve import atelier_up
from benchmarks.servers import roomy_settings, spread
from serve_app.client import AsyncClient
from serve_app.domain.requests import Variant
from serve_app.settings import ROOT
from tests.composition import open_resources

POCKET = ROOT / "models" / "pocket"
SAME_PICTURE = 2.0
"""Pictures of one job may differ by this many 8-bit levels in the mean: kernels round, nothing else may differ."""


Draw = Callable[[Job], Awaitable[bytes]]
"""Draws one picture with the job's number as its seed; returns the PNG."""


def lora_files(folder: Path) -> list[Path]:
    """Return 64 files: the bundled model's eight styles, each eight times at a strength of its own."""
    styles = [load_file(file) for file in sorted((POCKET / "loras").glob("*.safetensors"))]
    files = [folder / f"lora{k:02}.safetensors" for k in range(LORAS)]
    for k, file in enumerate(files):
        scaled = {
            name: (tensor.float() * (1 - k / 200)).half().contiguous()
            for name, tensor in styles[k % len(styles)].items()
        }
        save_file(scaled, file)
    return files


# -- servers -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def atelier(files: Sequence[Path], options: argparse.Namespace) -> AsyncGenerator[Draw]:
    """Serve by `atelier up` with its shipped settings, and a catalog of the files."""
    with tempfile.TemporaryDirectory(prefix="many-loras-") as folder:
        ids = [f"model_{chr(97 + k // 26)}{chr(97 + k % 26)}{'a' * 24}" for k in range(len(files))]
        created = {"base_model": "pocket", "created_at": "2026-11-26T12:00:00Z"}
        entries = [created | {"id": ids[k], "name": file.stem, "file": str(file)} for k, file in enumerate(files)]
        catalog = Path(folder) / "catalog.yaml"
        catalog.write_text(
            yaml.safe_dump({"base_models": [{"id": "pocket", "folder": str(POCKET)}], "adapters": entries})
        )
        settings = roomy_settings(Path(folder)).model_copy(update={"catalog": catalog})
        with atelier_up(settings, Path(folder), worker_niceness=0) as server:
            async with open_resources(settings) as resources:
                account = await resources.accounts.create("benchmark", plan_a="roomy")
                _, key = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
            async with AsyncClient(f"http://127.0.0.1:{server.port}", key) as client:

                async def draw(job: Job) -> bytes:
                    made = await client.generate(
                        job.prompt,
                        lora_id=ids[job.lora],
                        lora_weight=job.weight,
                        width=job.width,
                        height=job.height,
                        steps=job.steps,
                        guidance_scale=GUIDANCE,
                        seed=job.number,
                    )
                    (image,) = (await made.wait(timeout=None)).images
                    return await image.download()

                yield draw


@asynccontextmanager
async def openai(files: Sequence[Path], options: argparse.Namespace) -> AsyncGenerator[Draw]:
    """Ask a running server by OpenAI's images route; `--lora` is the JSON that its own extension takes for a LoRA."""
    async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {options.key}"}) as client:

        async def draw(job: Job) -> bytes:
            file = files[job.lora]
            values = {"name": file.stem, "path": str(file.resolve()), "weight": str(job.weight)}
            extension = re.sub(r"\{(name|path|weight)\}", lambda found: values[found[1]], options.lora)
            body = {
                "model": options.model,
                "prompt": job.prompt,
                "size": f"{job.width}x{job.height}",
                "num_inference_steps": job.steps,
                "guidance_scale": GUIDANCE,
                "seed": job.number,
                "response_format": "b64_json",
                **json.loads(extension),
            }
            answer = await client.post(f"{options.url}/images/generations", json=body)
            answer.raise_for_status()
            return base64.b64decode(answer.json()["data"][0]["b64_json"])

        yield draw


@asynccontextmanager
async def diffusers(files: Sequence[Path], options: argparse.Namespace) -> AsyncGenerator[Draw]:
    """Draw by diffusers in a loop, first in first out, in processes that each hold the model and every LoRA."""
    pool = ProcessPoolExecutor(
        options.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_load_diffusers,
        initargs=(options.model, files, options.threads, options.device),
    )
    with pool:
        loop = asyncio.get_running_loop()
        yield lambda job: loop.run_in_executor(pool, _draw_by_diffusers, job)


def _load_diffusers(model: str, files: Sequence[Path], threads: int, device: str) -> None:
    global _pipeline
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    torch.set_num_threads(threads)
    _pipeline = DiffusionPipeline.from_pretrained(model).to(device)
    _pipeline.set_progress_bar_config(disable=True)
    for k, file in enumerate(files):
        _pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=f"lora{k}")


_pipeline: Any = None
"""The pipeline of a process that draws by diffusers."""


def _draw_by_diffusers(job: Job) -> bytes:
    _pipeline.set_adapters(f"lora{job.lora}", job.weight)
    picture = _pipeline(
        job.prompt,
        generator=torch.Generator().manual_seed(job.number),
        num_inference_steps=job.steps,
        guidance_scale=GUIDANCE,
        width=job.width,
        height=job.height,
    ).images[0]
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


SERVERS = {"atelier": atelier, "openai": openai, "diffusers": diffusers}

# -- measuring -----------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    png: bytes
    submitted_s: float
    """Seconds after the first job was due; with arrivals, when this one was due."""
    ended_s: float


async def measure(draw: Draw, jobs: Sequence[Job], rate: float) -> list[Drawn]:
    """Send every job when it is due, all at once at a rate of 0; a late client counts as latency of the server."""
    chance, due, dues = random.Random(1), 0.0, list[float]()
    for _ in jobs:
        dues.append(due)
        due += chance.expovariate(rate) if rate else 0.0
    began = time.perf_counter()

    async def send(job: Job, due: float) -> Drawn:
        await asyncio.sleep(began + due - time.perf_counter())
        png = await draw(job)
        ended = time.perf_counter() - began
        print(f"{job.number}: {ended - due:.1f} s", file=sys.stderr)
        return Drawn(png, due, ended)

    return await asyncio.gather(*(send(job, due) for job, due in zip(jobs, dues, strict=True)))


def compare(jobs: Sequence[Job], drawn: Sequence[Drawn], folder: Path, reference: Path | None) -> list[str]:
    """Save every picture; return those of a wrong size, and those that are not the reference's picture."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for job, each in zip(jobs, drawn, strict=True):
        picture = Image.open(io.BytesIO(each.png)).convert("RGB")
        (folder / f"{job.number:04}.png").write_bytes(each.png)
        if picture.size != (job.width, job.height):
            wrong.append(f"{job.number}: {picture.size}")
        elif reference is not None:
            other = Image.open(reference / f"{job.number:04}.png").convert("RGB")
            far = float(np.abs(np.asarray(picture, np.int16) - np.asarray(other, np.int16)).mean())
            if far > SAME_PICTURE:
                wrong.append(f"{job.number}: {far:.1f} levels from the reference")
    return wrong


async def run(options: argparse.Namespace) -> dict[str, Any]:
    jobs = workload(options.jobs)
    async with AsyncExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = sorted(folder.glob("*.safetensors")) if options.folder else lora_files(folder)
        draw = await stack.enter_async_context(SERVERS[options.server](files, options))
        await measure(draw, workload(options.warm_up), 0.0)
        drawn = await measure(draw, jobs, options.rate)
        first = await draw(jobs[0])  # alone, after all others
    pictures = options.out.with_suffix("")
    wrong = compare(jobs, drawn, pictures, options.reference and options.reference.with_suffix(""))
    latencies = [each.ended_s - each.submitted_s for each in drawn]
    seconds = max(each.ended_s for each in drawn)
    return {
        "server": options.server,
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("torch", "diffusers", "peft")},
        "workload": hashlib.sha256(repr(jobs).encode()).hexdigest()[:12],
        "images": len(drawn),
        "distinct_loras": len({job.lora for job in jobs}),
        "images_per_s": len(drawn) / seconds,
        "latency_s": spread(latencies, 1),
        "p95_latency_s": statistics.quantiles(latencies, n=20)[-1],
        "same_bytes_alone": first == drawn[0].png,
        "wrong": wrong,
        "latencies_s": latencies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0, help="jobs a second (Poisson); 0: all at once")
    parser.add_argument("--warm-up", type=int, default=4, help="jobs before the clock runs")
    parser.add_argument("--folder", type=Path, help="64 LoRA files; none: made from the bundled model's")
    parser.add_argument("--reference", type=Path, help="another server's --out: its pictures are compared")
    parser.add_argument("--out", type=Path, required=True, help="a .json; the pictures lie beside it")
    parser.add_argument("--model", default=str(POCKET), help="a diffusers folder, or the name for --url")
    parser.add_argument("--url", default="", help="openai: the address up to /v1")
    parser.add_argument("--key", default="none", help="openai: the bearer key")
    parser.add_argument("--lora", default="{}", help="openai: JSON for the LoRA, with {name}, {path}, {weight}")
    parser.add_argument("--processes", type=int, default=1, help="diffusers: how many draw side by side")
    parser.add_argument("--threads", type=int, default=1, help="diffusers: CPU threads of each process")
    parser.add_argument("--device", default="cpu", help="diffusers")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"| {result['server']} | {result['images_per_s']:.3f} | {result['latency_s']} | {result['p95_latency_s']:.1f} | "
        f"{result['same_bytes_alone']} | {len(result['wrong'])} of {result['images']} |"
    )


if __name__ == "__main__":
    main()
