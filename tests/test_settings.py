from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.settings import Settings


def test_local_secrets_are_made_once_and_kept_private(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        peppers = set(pool.map(lambda _: Settings(data_dir=tmp_path).pepper_bytes, range(16)))
    assert len(peppers) == 1
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secrets.json"]


def test_secrets_from_the_environment_win_and_never_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_PEPPER", "spice")
    monkeypatch.setenv("ATELIER_SIGNING_KEYS", '{"new": "one", "old": "two"}')
    settings = Settings(data_dir=tmp_path)
    assert settings.pepper_bytes == b"spice"
    assert list(settings.url_keys) == ["new", "old"]
    assert "spice" not in repr(settings)
    assert not (tmp_path / "secrets.json").exists()


def test_redis_url_has_its_common_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://db:6379/1")
    assert Settings().redis_url == "redis://db:6379/1"
