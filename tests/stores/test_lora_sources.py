"""LoRAs fetched from elsewhere: only from below the operator's prefixes, streamed, within a size and a time."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from serve_app.domain.errors import InvalidParameter, PayloadTooLarge
from serve_app.settings import Settings
from serve_app.stores import lora_sources
from serve_app.stores.lora_sources import LoraSources

WEIGHTS = b"weights" * 1000
stalling = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/loras/moved":
            self.send_response(302)
            self.send_header("Location", "/secret")
            self.end_headers()
            return
        if self.path == "/loras/stalls":
            stalling.wait(20)
        self.send_response(200 if self.path in ("/loras/ink", "/secret") else 404)
        body = b"secret" if self.path == "/secret" else WEIGHTS
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a web server on this machine, with files below `loras/` and others."""
    stalling.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        stalling.set()
        server.shutdown()


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., LoraSources]:
    def made(*prefixes: str, largest: int = 1 << 20) -> LoraSources:
        return LoraSources(
            Settings.model_validate({"data_dir": tmp_path / "var", "lora_sources": prefixes, "max_lora_size": largest})
        )

    return made


async def _unasked() -> None:
    """Nothing is asked."""


async def test_files_and_folders_are_fetched_from_every_kind_of_storage(
    sources: Callable[..., LoraSources], address: str, tmp_path: Path
) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/loras/ink": WEIGHTS, "/loras/peft/adapter_config.json": b"{}"})
    files.pipe("/loras/peft/adapter_model.safetensors", WEIGHTS)
    (tmp_path / "ink").write_bytes(WEIGHTS)
    allowed = sources("memory://loras/", tmp_path.as_uri() + "/", address + "/loras/")
    for number, source in enumerate(("memory://loras/ink", (tmp_path / "ink").as_uri(), f"{address}/loras/ink")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert (await allowed.fetch(source, folder, before_block=_unasked)).read_bytes() == WEIGHTS, source
    peft = tmp_path / "peft"
    peft.mkdir()
    assert await allowed.fetch("memory://loras/peft/", peft, before_block=_unasked) == peft
    assert {path.name for path in peft.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    "source",
    [
        "s3://acme-evil/x", "s3://acme", "s3://acme/loras/", "s3://acme/other/x", "S3://acme/loras/x", "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data", "s3://acme/loras/../other/x", "s3://acme/loras/./x", "s3://acme/loras/x?y",
        "s3://acme/loras/%2e%2e/x", "s3://acme/loras/x::http://inside/", "simplecache::s3://acme/loras/x", "x", "s3://acme/loras/x#y",
        "s3://acme/loras//x", "s3://acme/loras/..", "s3://acme/loras/a b",
    ],
)  # fmt: skip
def test_only_plain_addresses_below_a_prefix_are_allowed(sources: Callable[..., LoraSources], source: str) -> None:
    allowed = sources("s3://acme/loras/", "hf://acme/")
    for good in ("s3://acme/loras/x/y.safetensors", "hf://acme/ink@main/x.safetensors", "s3://acme/loras/peft/"):
        allowed.check(good)
    with pytest.raises(InvalidParameter, match="must be a plain address below"):
        allowed.check(source)
    with pytest.raises(InvalidParameter, match="fetches nothing"):
        sources().check("s3://acme/loras/x")


@pytest.mark.parametrize(
    "prefix", ["s3://", "s3://acme", "https://", "acme/", "s3://acme/x", "https://a b/", "::s3://a/"]
)
def test_a_prefix_that_would_allow_too_much_stops_the_process(prefix: str) -> None:
    with pytest.raises(ValueError, match="lora_sources"):
        Settings.model_validate({"lora_sources": prefix})


async def test_a_redirect_is_not_followed_and_what_is_missing_large_or_slow_is_refused(
    sources: Callable[..., LoraSources], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sources(address + "/loras/", "gs://acme/", largest=1000)
    fetched = tmp_path / "upload.safetensors"
    try:
        await allowed.fetch(f"{address}/loras/moved", tmp_path, before_block=_unasked)
    except InvalidParameter:
        fetched.unlink(missing_ok=True)
    assert not fetched.exists() or b"secret" not in fetched.read_bytes()
    fetched.unlink(missing_ok=True)
    with pytest.raises(InvalidParameter, match="no such file"):
        await allowed.fetch(f"{address}/loras/none", tmp_path, before_block=_unasked)
    with pytest.raises(PayloadTooLarge, match="1000 bytes"):
        await allowed.fetch(f"{address}/loras/ink", tmp_path, before_block=_unasked)
    with pytest.raises(InvalidParameter, match="no library for gs://"):
        await allowed.fetch("gs://acme/x", tmp_path, before_block=_unasked)
    monkeypatch.setattr(lora_sources, "LIMIT_S", 0.2)
    with pytest.raises(InvalidParameter, match=r"longer than 0\.2 s"):
        await allowed.fetch(f"{address}/loras/stalls", tmp_path, before_block=_unasked)
