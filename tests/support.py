"""What tests share: waiting without sleeping, a free port, a small catalog, tiny adapter files."""

import asyncio
import inspect
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import yaml

from serve_app.domain.errors import StoreUnavailable

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
POCKET_ADAPTERS = ("outline", "mosaic", "neon", "stripes", "blueprint", "sepia", "confetti", "shadow")
PRIVATE_ADAPTER = "model_" + "private".ljust(26, "2")
"""In the test catalog; only the account named `owner` may use it."""


async def wait_until(predicate: Callable[[], object | Awaitable[object]], timeout: float = 30) -> None:  # noqa: ASYNC109 - it is what callers set
    """Return as soon as `predicate` (plain or async) holds; fail after `timeout` seconds. A store that does not answer is
    asked again: it may be down, or this machine crowded. What is awaited may swallow the timeout's one cancel, as a Redis
    call that is answered at that moment does (CPython issue 86296): then it is asked no more all the same."""
    async with asyncio.timeout(timeout) as limit:
        while not limit.expired():
            with suppress(StoreUnavailable):
                answer = predicate()
                if inspect.isawaitable(answer):
                    answer = await answer
                if answer:
                    return
            await asyncio.sleep(0.01)
        raise TimeoutError


def free_port() -> int:
    """A port of this machine that nobody listens on. It is none of those that the kernel gives to clients, nor of those
    that `deployments/runtime.py` picks, so that it is still free when its user gets to it."""
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def adapter_id(name: str) -> str:
    """The id that the test catalog gives the adapter called `name`."""
    return "model_" + name.ljust(26, "2")


def write_safetensors(path: Path, *, fill: int = 0) -> Path:
    """A valid safetensors file of one tiny LoRA pair; `fill` (0..15) makes its bytes, hence its digest, differ."""
    tensors = {"unet.x.lora_A.weight": [4, 8], "unet.x.lora_B.weight": [8, 4]}
    header: dict[str, object] = {}
    offset = 0
    for name, shape in tensors.items():
        size = shape[0] * shape[1] * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<f", fill / 16) * (offset // 4))
    return path


def write_catalog(folder: Path) -> Path:
    """A catalog of the eight pocket adapters (tiny stand-ins where a file is not there) and one private adapter."""
    rows: list[dict[str, object]] = []
    for index, name in enumerate((*POCKET_ADAPTERS, "private")):
        file = POCKET / "loras" / f"{name}.safetensors"
        if not file.exists():
            file = write_safetensors(folder / "loras" / f"{name}.safetensors", fill=index)
        row: dict[str, object] = {
            "id": adapter_id(name),
            "name": name.title(),
            "description": f"The {name} look.",
            "created_at": f"2026-11-{index + 1:02d}T12:00:00Z",
            "file": str(file),
            "base_model": "pocket",
        }
        rows.append(row)
    rows[-1]["accounts"] = ["owner"]
    catalog = folder / "catalog.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    catalog.write_text(yaml.safe_dump({"base_models": [{"id": "pocket", "folder": str(POCKET)}], "adapters": rows}))
    return catalog
