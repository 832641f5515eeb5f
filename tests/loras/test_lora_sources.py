"""LoRAs are fetched only below the operator's prefixes, streamed, within a size and a time."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from serve_app.domain.errors import InvalidParameter, PayloadTooLarge
from serve_app.loras import sources as lora_sources
from serve_app.loras.sources import LoraSources
from serve_app.settings import Settings
from tests.support import Answering, serving

WEIGHTS = b"weights" * 1000
stalling = threading.Event()


class _Files(Answering):
    def do_GET(self) -> None:
        if self.path == "/loras/moved":
            return self.answer(302, b"", Location="/secret")
        if self.path == "/loras/stalls":
            stalling.wait(20)
        status = 200 if self.path in ("/loras/ink", "/secret") else 404
        return self.answer(status, b"secret" if self.path == "/secret" else WEIGHTS)

    do_HEAD = do_GET


@pytest.fixture
def address() -> Iterator[str]:
    """Serve files below `loras/` and others; yield the server's address."""
    stalling.clear()
    with serving(_Files) as address:
        yield address
        stalling.set()


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., LoraSources]:
    def made(*prefixes: str, largest: int = 1 << 20) -> LoraSources:
        return LoraSources(
            Settings.model_validate({"data_dir": tmp_path / "var", "lora_sources": prefixes, "max_lora_size": largest})
        )

    return made


async def _unasked() -> None:
    """Nothing is asked."""


class _Hub(Answering):
    """The routes of the Hugging Face Hub by which its library reads a file: `acme/ink` holds `x.safetensors`."""

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/api/models/acme/ink": {"id": "acme/ink", "sha": "b" * 40, "siblings": []},
            "/api/models/acme/ink/tree/main": [
                {"type": "file", "path": "x.safetensors", "size": len(WEIGHTS), "oid": "a" * 40}
            ],
        }
        if self.path == "/acme/ink/resolve/main/x.safetensors":
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            place = f"bytes {first}-{last}/{len(WEIGHTS)}"
            return self.answer(206, WEIGHTS[int(first) : int(last) + 1], Content_Range=place)
        if (body := answers.get(self.path.partition("?")[0])) is None:
            return self.answer(404, b"")
        return self.answer(200, json.dumps(body).encode(), Content_Type="application/json")


FETCH_FROM_HUB = """
import asyncio, sys
from pathlib import Path
from serve_app.domain.errors import InvalidParameter
from serve_app.settings import Settings
from serve_app.loras.sources import LoraSources

async def unasked(): pass

async def fetch(name):
    sources = LoraSources(Settings.model_validate({"data_dir": sys.argv[1] + "/var", "lora_sources": ("hf://acme/",)}))
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    try:
        path = await sources.fetch(f"hf://acme/{name}/x.safetensors", folder, before_block=unasked)
        print(name, len(path.read_bytes()))
    except InvalidParameter as error:
        print(name, error.message)

for name in ("ink", "nobodys"):
    asyncio.run(fetch(name))
"""


@pytest.mark.slow
def test_a_file_of_the_hugging_face_hub_is_fetched_and_what_the_hub_does_not_give_is_refused(tmp_path: Path) -> None:
    """It runs in another process, since the library reads the hub's address when it is imported."""

    def fetched(hub: str, folder: Path) -> str:
        folder.mkdir()
        env = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
        ran = subprocess.run(
            [sys.executable, "-c", FETCH_FROM_HUB, folder], env=env, capture_output=True, text=True, check=True
        )
        return ran.stdout

    with serving(_Hub) as hub:
        assert fetched(hub, tmp_path / "up") == "ink 7000\nnobodys source: it cannot be read (HfHubHTTPError)\n"
    assert fetched(hub, tmp_path / "down").count("source: it cannot be read (ConnectError)") == 2


async def test_a_file_of_an_s3_storage_is_fetched_with_the_services_own_key(s3: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    s3fs.S3FileSystem(**s3).pipe("pictures/loras/ink.safetensors", WEIGHTS)
    settings = {
        "data_dir": tmp_path / "var",
        "lora_sources": ("s3://pictures/loras/",),
        "storage_url": "s3://pictures/images",
        "storage_options": s3,
    }
    allowed = LoraSources(Settings.model_validate(settings))
    found = await allowed.fetch("s3://pictures/loras/ink.safetensors", tmp_path, before_block=_unasked)
    assert found.read_bytes() == WEIGHTS
    with pytest.raises(InvalidParameter, match="no such file"):
        await allowed.fetch("s3://pictures/loras/none", tmp_path / "var", before_block=_unasked)


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
        "s3://acme-evil/x", "s3://acme", "s3://acme/loras/", "s3://acme/other/x", "S3://acme/loras/x", "x",
        "file:///etc/passwd", "http://169.254.169.254/latest/meta-data", "s3://acme/loras/../other/x",
        "s3://acme/loras/./x", "s3://acme/loras/x?y", "s3://acme/loras/%2e%2e/x", "s3://acme/loras/x::http://inside/",
        "simplecache::s3://acme/loras/x", "s3://acme/loras/x#y", "s3://acme/loras//x", "s3://acme/loras/..",
        "s3://acme/loras/a b",
    ],
)  # fmt: skip
def test_only_plain_addresses_below_a_prefix_are_allowed(sources: Callable[..., LoraSources], source: str) -> None:
    allowed = sources("s3://acme/loras/", "hf://acme/")
    for good in ("s3://acme/loras/x/y.safetensors", "hf://acme/ink@main/x.safetensors", "s3://acme/loras/peft/"):
        allowed.check(good)
    with pytest.raises(InvalidParameter, match="must be a plain address below"):
        allowed.check(source)
    with pytest.raises(InvalidParameter, match="fetching is not enabled"):
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
