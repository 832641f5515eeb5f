"""What all tests share: waiting without sleeping, Redis without a disk, a free port, tiny adapters."""

import asyncio
import hashlib
import inspect
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import pytest
import redis
import yaml
from PIL import Image

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import Claim, StoredImage, new_image_id
from serve_app.domain.requests import ImageFormat
from serve_app.jobs.images import ImageStore
from serve_app.store.embedded_redis import stop_redis
from serve_app.store.redis_process import server_binary
from tests.lua_coverage import REDIS_LOG_FOLDER

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
T = TypeVar("T")
POCKET_ADAPTERS = ("outline", "mosaic", "neon", "stripes", "blueprint", "sepia", "confetti", "shadow")
PRIVATE_ADAPTER = "model_" + "private".ljust(26, "2")
"""An adapter of the test catalog that only the account named `owner` may use."""


async def wait_until(predicate: Callable[[], object | Awaitable[object]], timeout: float = 30) -> None:  # noqa: ASYNC109
    """Return as soon as `predicate` (plain or async) holds; raise `TimeoutError` after `timeout` seconds.

    A store that is unavailable is asked again. The timeout holds even when the predicate swallows its one cancel, as a
    Redis call that is answered at that moment does (CPython issue 86296).
    """
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


@contextmanager
def volatile_redis(program: Path | None = None) -> Generator[str]:
    """Start a Redis server that writes nothing to disk, the embedded one's program or this; yield its URL.

    It is for every test that is not about durability.
    """
    with TemporaryDirectory(prefix="atelier-tests-", dir="/tmp") as folder:  # a socket's path has 108 bytes at most
        socket_path = Path(folder) / "redis.sock"
        options = {"port": "0", "unixsocket": str(socket_path), "dir": folder, "save": "", "appendonly": "no"}
        if logs := os.environ.get(REDIS_LOG_FOLDER):
            options["logfile"] = f"{logs}/{Path(folder).name}.log"
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        with subprocess.Popen([str(program or server_binary()), *arguments], stdout=subprocess.DEVNULL) as server:
            try:
                _wait_until_it_answers(server, socket_path)
                yield f"unix://{socket_path}"
            finally:
                server.terminate()


def _wait_until_it_answers(server: subprocess.Popen[bytes], socket_path: Path) -> None:
    deadline = time.monotonic() + 30
    with redis.Redis(unix_socket_path=str(socket_path)) as client:
        while time.monotonic() < deadline:
            assert server.poll() is None, "the Redis of the tests did not start"
            with suppress(redis.ConnectionError):
                if client.ping():
                    return
            time.sleep(0.01)
    raise TimeoutError("the Redis of the tests did not answer")


@contextmanager
def mounted_disk(place: Path, *, megabytes: int) -> Generator[Path]:
    """Mount a disk of this size at `place`, which can really be full.

    A Redis at `place`/var is stopped at the end.
    """
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        stop_redis(place / "var")
        subprocess.run(["umount", "-l", str(place)], check=True)


def existing(value: T | None) -> T:
    """Return what must be there."""
    assert value is not None
    return value


def growth(work: Callable[[int], object], size: int) -> float:
    """Return how many times the processor time of `work(8 * size)` is that of `work(size)`, each the best of three.

    That is 8 where time is linear in the size, and 64 where it is quadratic: a bound of 24 is far from both.
    """

    def seconds(size: int) -> float:
        began = time.process_time()
        work(size)
        return time.process_time() - began

    return min(seconds(8 * size) for _ in range(3)) / min(seconds(size) for _ in range(3))


def until(condition: Callable[[], bool], limit: float = 200, why: Callable[[], str] = lambda: "not in time") -> None:
    """Poll until the condition holds, for tests of other processes that have no event loop of their own.

    A condition that takes long, such as Serve's status, is asked for less often: it keeps others from their work.
    """
    asked, deadline = time.monotonic(), time.monotonic() + limit
    while not condition():
        answered = time.monotonic()
        assert answered < deadline, why()
        time.sleep(min(max(0.1, 10 * (answered - asked)), 0.5))
        asked = time.monotonic()


class Answering(BaseHTTPRequestHandler):
    """Sends whole answers, and logs nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Generator[str]:
    """Serve on this machine until the block ends; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def plain_redis(url: str, **options: Any) -> Any:
    """A blocking client that reads what is no UTF-8, too; untyped, as redis-py types its answers for both kinds."""
    return redis.Redis.from_url(url, decode_responses=True, encoding_errors="surrogateescape", **options)


@contextmanager
def memory_limit(client: Any, most: int = 1) -> Generator[None]:
    """Meanwhile the server holds at most this many bytes; with one byte it takes nothing more."""
    before = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory", most)
    try:
        yield
    finally:
        client.config_set("maxmemory", before)


def end_sooner(client: Any, window: str, ms: int) -> int:
    """Let an open window of a rate limit end in this time; return its new end in ms since 1970."""
    seconds, micros = client.time()
    ends = seconds * 1000 + micros // 1000 + ms
    client.zadd(window, dict.fromkeys(client.zrange(window, 0, -1), ends))
    client.pexpireat(window, ends)
    return ends


def says_ready(base_url: str) -> bool:
    """Return whether a service answers polls, and its generator lives or will start."""
    answer = httpx.get(f"{base_url}/readyz", timeout=5)
    return answer.is_success and answer.json()["status"] == "ready"


def slowed(monkeypatch: pytest.MonkeyPatch, call: str, path: Path | None = None) -> list[bool]:
    """Let a call of `os`, or only those for `path`, end when the event loop has turned meanwhile.

    Returns a list that tells of each call whether it did, as it cannot where the call itself stands on the loop; those
    after one that stood are not waited for.
    """
    loop, work, turned = asyncio.get_running_loop(), getattr(os, call), list[bool]()

    def slow(*args: Any, **options: Any) -> Any:
        if path in (None, args[0]):
            turn = threading.Event()
            loop.call_soon_threadsafe(turn.set)
            turned.append(all(turned) and turn.wait(10))
        return work(*args, **options)

    monkeypatch.setattr(os, call, slow)
    return turned


async def end_tasks(tasks: Collection[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks until they have ended: a Redis call may swallow a cancel (CPython issue 86296)."""
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=1)


_given_ports: set[int] = set()


def free_port() -> int:
    """Return a free port outside the kernel's client range and that of `deployments/runtime.py`.

    So it stays free until it is used: given once, and out of a range of this worker's own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    width = 10_000 // count
    while True:
        port = 10_000 + worker * width + secrets.randbelow(width)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def adapter_id(name: str) -> str:
    """Return the id of the adapter called `name` in the test catalog."""
    return "model_" + name.ljust(26, "2")


async def store_image(images: ImageStore, claim: Claim, index: int = 0) -> StoredImage:
    """Store a picture of the size asked for, as a worker does."""
    size = (claim.request.width, claim.request.height)
    form, lease = claim.request.output_format, claim.lease
    content = png_of(size, form)
    name = images.object_name(claim.account_id, lease.job_id, lease.attempt, index, datetime.now(UTC), form)
    return StoredImage(
        image_id=new_image_id(),
        image_uri=await images.put(name, content),
        width=size[0],
        height=size[1],
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
    )


def png_of(size: tuple[int, int], form: ImageFormat = ImageFormat.PNG) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, (120, 60, 30)).save(out, form, compress_level=1)
    return out.getvalue()


def write_safetensors(path: Path, *, fill: int = 0) -> Path:
    """Write a valid safetensors file of one tiny LoRA pair.

    `fill` (0..15) changes its bytes and so its digest.
    """
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


def lora_record(file: str | Path = "memory://mine.safetensors", **fields: Any) -> Adapter:
    """Return a LoRA of the pocket model, with the digest of its file if that is here; `fields` replace what it has."""
    sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else "1" * 64
    record = Adapter(
        id="model_mine",
        name="Mine",
        description="",
        created_at=datetime(2026, 11, 22, tzinfo=UTC),
        file=str(file),
        sha256=sha256,
        base_model="pocket",
        accounts=frozenset(),
    )
    return replace(record, **fields)


_adapters = count(1)


def adapter_of(owner: str, **fields: Any) -> Adapter:
    """Return a LoRA of an account, newer than all before it, with weights of its own that nobody looks at.

    Its id has no digit, so that a search for one finds names.
    """
    own_id = "model_" + secrets.token_hex(13).translate(str.maketrans("0123456789", "ghijklmnop"))
    created_at = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=next(_adapters))
    facts: dict[str, Any] = {"id": own_id, "name": "Ink", "created_at": created_at, "sha256": secrets.token_hex(32)}
    return lora_record(**{**facts, "owner": owner, **fields})


CatalogRows = list[dict[str, Any]]


def rewrite_catalog(file: Path, change: Callable[[CatalogRows], object]) -> None:
    """Change the rows of the adapters in a catalog file."""
    content = yaml.safe_load(file.read_text())
    change(content["adapters"])
    file.write_text(yaml.safe_dump(content))


def change_base_model(file: Path, base_model: str = "pocket", **fields: object) -> None:
    """Change fields of a base model in a catalog file."""
    content = yaml.safe_load(file.read_text())
    for row in content["base_models"]:
        if row["id"] == base_model:
            row.update(fields)
    file.write_text(yaml.safe_dump(content))


def add_base_model(file: Path, base_model: str, folder: Path = POCKET, **fields: object) -> None:
    """Add a base model to a catalog file."""
    content = yaml.safe_load(file.read_text())
    content["base_models"].append({"id": base_model, "folder": str(folder), **fields})
    file.write_text(yaml.safe_dump(content))


def pocket_of_widths(folder: Path, **widths: object) -> Path:
    """Copy what describes the pocket model, with other numbers in its denoiser's configuration."""
    for file in ("model_index.json", "unet/config.json", "text_encoder/config.json"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        described = json.loads((POCKET / file).read_text()) | (widths if file.startswith("unet") else {})
        (folder / file).write_text(json.dumps(described))
    return folder


def put_in_group(file: Path, group: str, base_model: str = "pocket") -> None:
    """Change the group of a base model in a catalog file."""
    change_base_model(file, base_model, group=group)


def write_catalog(folder: Path) -> Path:
    """Write a catalog of the eight pocket adapters and one private adapter, as JSON, which is YAML.

    A missing adapter gets a tiny file.
    """
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
    catalog.write_text(
        json.dumps({"base_models": [{"id": "pocket", "folder": str(POCKET)}], "adapters": rows}, indent=1)
    )
    return catalog
