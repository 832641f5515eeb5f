"""Whatever a service keeps in its data directory is its owner's alone, whatever the umask."""

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from serve_app.jobs.images import ImageStore
from serve_app.loras.weights import WeightStore
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.storage import open_to_others
from tests.support import lora_record, write_safetensors


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder that every user of the machine can enter, as pytest's own are not.

    Files are made with an open umask.
    """
    before = os.umask(0)
    try:
        with TemporaryDirectory(prefix="atelier-tests-", dir="/tmp") as folder:
            Path(folder).chmod(0o755)
            yield Path(folder)
    finally:
        os.umask(before)


async def fill(data_dir: Path, source: Path) -> Path:
    """Fill a data directory with what the real stores put there.

    These are secrets, Redis, an image and an adapter's weights.
    """
    settings = Settings(data_dir=data_dir)
    assert settings.pepper_bytes
    ensure_redis(data_dir)
    await image_in(settings)
    file = write_safetensors(source / "one.safetensors")
    return await WeightStore(settings).fetch(lora_record(file))


async def image_in(settings: Settings) -> Path:
    images = ImageStore(settings)
    name = images.object_name("account", "gen_one", 1, 0, datetime.now(UTC))
    return Path((await images.put(name, b"a picture")).removeprefix("file://"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("is_made_before", [False, True])
async def test_every_folder_and_file_is_private_in_a_folder_that_keeps_its_mode(
    place: Path, tmp_path: Path, is_made_before: bool
) -> None:
    data_dir = place / "deep" / "var"
    if is_made_before:
        data_dir.mkdir(parents=True, mode=0o755)
    try:
        await fill(data_dir, tmp_path)
        found = {path.relative_to(data_dir): path for path in data_dir.rglob("*")}
        assert {path.parts[0] for path in found} == {"images", "redis", "secrets.json", "weights"}
        wanted = {name: oct(0o700 if path.is_dir() else 0o600) for name, path in found.items()}
        assert {name: oct(mode(path)) for name, path in found.items()} == wanted
        assert mode(data_dir) == (0o755 if is_made_before else 0o700)
        assert open_to_others(data_dir) == ([data_dir] if is_made_before else [])
    finally:
        stop_redis(data_dir)


def test_what_others_can_open_is_named_unless_the_folder_is_closed(place: Path) -> None:
    data_dir = place / "var"
    (data_dir / "images").mkdir(parents=True)
    (data_dir / "weights").mkdir(mode=0o700)
    (data_dir / "local.json").touch(mode=0o644)
    (data_dir / "redis").symlink_to("/tmp")
    assert [path.name for path in open_to_others(data_dir)] == ["var", "images", "local.json"]
    assert open_to_others(data_dir / "local.json") == [data_dir / "local.json"]
    data_dir.chmod(0o700)
    assert open_to_others(data_dir) == open_to_others(data_dir / "nothing") == []


async def test_storage_that_the_operator_shares_stays_shared(place: Path) -> None:
    shared = place / "bucket"
    shared.mkdir(mode=0o750)
    os.umask(0o077)
    image = await image_in(Settings(data_dir=place / "var", redis_url="unix:///unused", storage_url=shared.as_uri()))
    assert mode(image) == 0o640
    assert {mode(folder) for folder in (shared, image.parent, image.parent.parent)} == {0o750}
