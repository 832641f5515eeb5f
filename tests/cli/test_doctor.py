"""`atelier doctor`: every check passes on a healthy service; each defect is one finding with advice."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from deployments.local import only_one
from deployments.runtime import runtime_home
from serve_app.domain.canary import FOLDER, Drawing
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.redis_inspection import DURABLE
from serve_app.store.storage import FINDINGS
from tests.cli.conftest import Atelier
from tests.live import Live
from tests.support import free_port, serving

Finding = dict[str, str]


def _change(atelier: Atelier, change: Callable[[Any], object]) -> None:
    """Change the content of the service's catalog."""
    content = yaml.safe_load(atelier.settings.catalog.read_text())
    change(content)
    atelier.settings.catalog.write_text(yaml.safe_dump(content))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded server with its durable settings, which the doctor checks."""
    home = tmp_path_factory.mktemp("durable")
    yield ensure_redis(home).url
    stop_redis(home)


@pytest.mark.slow
def test_a_healthy_service_passes(atelier: Atelier) -> None:
    atelier.settings.data_dir.mkdir(parents=True)
    ended = atelier("doctor", "--json", "--port", str(free_port()))
    findings = {row["name"]: row for row in json.loads(ended.out)["checks"]}
    assert ended.code == 0, ended.out
    for name in ("versions", "data directory", "redis", "redis durability", "storage", "catalog", "weights", "port"):
        assert findings[name]["level"] == "ok", findings[name]
    assert "torch" in findings["versions"]["found"]
    assert not list((atelier.settings.data_dir / "images").rglob("*.png")), "what was written is gone"


def test_before_the_first_start_it_changes_nothing(atelier: Atelier, tmp_path: Path) -> None:
    place = tmp_path / "fresh"
    ended = atelier("doctor", "--data-dir", str(place), "--port", str(free_port()), env={"ATELIER_REDIS_URL": ""})
    assert ended.code == 0, ended.out
    assert not place.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value"), [("appendfsync", "everysec"), ("appendonly", "no"), ("maxmemory-policy", "allkeys-lru")]
)
def test_a_redis_that_may_lose_jobs_fails(atelier: Atelier, redis_db: redis.Redis, setting: str, value: str) -> None:
    good = DURABLE[setting]
    redis_db.config_set(setting, value)
    try:
        _finding(atelier, "redis durability", level="fail", found=f"{setting} {value}", advice=f"{setting} {good}")
    finally:
        redis_db.config_set(setting, good)


@pytest.mark.slow
def test_memory_that_fills_up_is_named_by_its_share(atelier: Atelier, redis_db: redis.Redis) -> None:
    redis_db.setrange("ballast", 16 << 20, "x")  # beside it, what connections and scripts take counts for little
    limit = redis_db.info("memory")["maxmemory"]
    _finding(atelier, "redis memory", level="ok")
    used = redis_db.info("memory")["used_memory"]  # now that the write's own buffers are free again
    try:
        redis_db.config_set("maxmemory", int(used * 1.15))
        _finding(atelier, "redis memory", level="warn")
        redis_db.config_set("maxmemory", int(used * 1.05))
        _finding(atelier, "redis memory", level="fail", found="new jobs are refused")
        redis_db.config_set("maxmemory", 0)
        _finding(atelier, "redis memory", found="without a limit")
    finally:
        redis_db.config_set("maxmemory", limit)


@pytest.mark.slow
def test_a_redis_that_does_not_let_us_ask_is_a_warning(atelier: Atelier, redis_db: redis.Redis) -> None:
    redis_db.execute_command("ACL", "SETUSER", "shy", "on", ">secret", "~*", "+@all", "-config")
    try:
        url = atelier.settings.redis_url.replace("unix://", "unix://shy:secret@")
        _finding(atelier, "redis durability", "--redis-url", url, level="warn", advice="appendfsync always")
    finally:
        redis_db.execute_command("ACL", "DELUSER", "shy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "value", "advice"),
    [
        ("storage", "ATELIER_STORAGE_URL", "file:///dev/null/images", "ATELIER_STORAGE_URL"),
        ("disk", "ATELIER_DISK_RESERVE", "1000000TiB", "new jobs are refused"),
    ],
)
def test_a_storage_that_takes_no_image_fails(
    atelier: Atelier, name: str, setting: str, value: str, advice: str
) -> None:
    _finding(atelier, name, env={setting: value}, level="fail", advice=advice)


@pytest.mark.slow
def test_wrong_weights_are_named(atelier: Atelier) -> None:
    _change(atelier, lambda content: content["adapters"][0].update(sha256="0" * 64))
    _finding(atelier, "weights", level="fail", found="Outline")


@pytest.mark.slow
def test_a_base_model_that_is_missing_or_lacks_its_config_is_named(atelier: Atelier, tmp_path: Path) -> None:
    (tmp_path / "painting.safetensors").touch()
    painting = {"id": "painting", "file": str(tmp_path / "painting.safetensors")}
    _change(atelier, lambda content: content["base_models"].append(painting))
    found, advice = f"no model_index.json in {tmp_path / 'painting'}", "diffusers folder of the same architecture"
    _finding(atelier, "base model", found=found, advice=advice)
    _change(atelier, lambda content: content["base_models"][0].update(folder="/nowhere/model"))
    _finding(atelier, "base model", found="/nowhere/model")


def test_a_row_that_is_set_aside_fails_by_name(atelier: Atelier) -> None:
    _change(atelier, lambda content: content["adapters"][0].update(color="red"))
    findings = _findings(atelier, "catalog")
    assert [finding["level"] for finding in findings] == ["ok", "fail"]
    assert "unknown field 'color'" in findings[1]["found"]


def test_a_broken_catalog_fails_and_the_rest_is_still_looked_at(atelier: Atelier) -> None:
    atelier.settings.catalog.write_text("adapters: [")
    _finding(atelier, "catalog", level="fail")
    _finding(atelier, "port")


@pytest.mark.slow
def test_a_port_that_a_service_of_this_program_holds_is_no_failure(
    atelier: Atelier, live: Live, ready_file: Path
) -> None:
    own = live.base_url.rpartition(":")[2]
    _finding(atelier, "port", "--port", own, level="ok")
    ready_file.unlink()  # as `serve run` writes none
    _finding(atelier, "port", "--port", own, level="warn", advice="--port")


def test_a_port_that_another_program_holds_fails(atelier: Atelier) -> None:
    with serving(SimpleHTTPRequestHandler) as address:
        _finding(atelier, "port", "--port", address.rpartition(":")[2], level="fail", advice="--port")


def test_secrets_that_others_can_read_fail(atelier: Atelier, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "secrets.json").write_text("{}")
    (place / "secrets.json").chmod(0o644)
    words, env = ("--data-dir", str(place)), {"ATELIER_REDIS_URL": ""}
    _finding(atelier, "secrets", *words, env=env, level="fail", advice="chmod 600")


@pytest.mark.slow
def test_what_other_users_can_open_is_named(atelier: Atelier, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    (place / "images").mkdir(parents=True, mode=0o755)
    (place / "weights").mkdir(mode=0o700)
    words, advice = ("--data-dir", str(place)), f"chmod -R go= {place}"
    finding = _finding(atelier, "privacy", *words, level="warn", found=f"{place}/images", advice=advice)
    assert "weights" not in finding["found"]
    place.chmod(0o700)  # nobody else can enter it
    _finding(atelier, "privacy", *words, level="ok")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN_PATH", "RAY_SERVE_HAPROXY_SOCKET_PATH"])
def test_a_token_or_a_socket_that_other_users_can_open_is_named(atelier: Atelier, tmp_path: Path, name: str) -> None:
    """With the token they run code as this user, with the socket they send the service's callers elsewhere."""
    folder = tmp_path / "private"
    folder.mkdir()
    file = folder / "secret"
    file.touch(mode=0o644)
    folder.chmod(0o755)
    (found,) = [row for row in _findings(atelier, "privacy", env={name: str(file)}) if str(folder) in row["found"]]
    assert found["level"] == "warn"
    assert str(file) in found["found"]
    file.chmod(0o600)
    folder.chmod(0o700)
    assert not [row for row in _findings(atelier, "privacy", env={name: str(file)}) if str(folder) in row["found"]]


@pytest.mark.slow
def test_an_embedded_redis_that_ended_under_the_service_fails(atelier: Atelier, tmp_path: Path) -> None:
    """It ends on a full disk, for example; without the service, a Redis that does not run is as it should be."""
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    words, env = ("--data-dir", str(place)), {"ATELIER_REDIS_URL": ""}
    assert _finding(atelier, "redis", *words, env=env)["level"] != "fail"
    with only_one(place):
        _finding(atelier, "redis", *words, env=env, level="fail", advice=str(place / "redis" / "redis.log"))
    shutil.rmtree(runtime_home(place))
    assert _finding(atelier, "redis", *words, env=env)["level"] != "fail"


@pytest.mark.slow
def test_an_embedded_redis_that_does_not_answer_is_named_by_its_process(atelier: Atelier, tmp_path: Path) -> None:
    pid = ensure_redis(tmp_path).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        words, env = ("--data-dir", str(tmp_path)), {"ATELIER_REDIS_URL": ""}
        _finding(atelier, "redis", *words, env=env, level="fail", found=f"does not answer (process {pid})")
    finally:
        assert stop_redis(tmp_path, timeout=0.1)


@pytest.mark.slow
def test_a_redis_that_is_not_there_fails_and_a_person_sees_marks_and_advice(atelier: Atelier) -> None:
    _finding(atelier, "redis", "--redis-url", "redis://127.0.0.1:9", level="fail")
    out = atelier("doctor", "--redis-url", "redis://127.0.0.1:9").out
    assert "FAIL  redis" in out
    assert "cannot be reached" in out
    assert "start it, or correct ATELIER_REDIS_URL" in out


@pytest.mark.slow
def test_kernels_that_fall_back_on_a_card_are_named_with_what_it_costs(atelier: Atelier, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.159.04'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = _finding(
        atelier,
        "kernels",
        env={"PATH": str(tmp_path), "CC": ""},
        level="warn",
        found="lora does not (Triton has no C compiler: install gcc and libc6-dev",
        advice="docs/operate/sizing.md",
    )
    assert "a step of SDXL 1.2 times as long" in found["found"]
    (tmp_path / "gcc").symlink_to("/bin/true")
    _finding(
        atelier,
        "kernels",
        env={"PATH": str(tmp_path)},
        level="warn",
        found="unet does not (Torch not compiled with CUDA",
    )
    assert not _findings(atelier, "kernels", env={"PATH": "/nonexistent"}), "without a card there is nothing to say"


@pytest.mark.slow
def test_an_update_that_changed_pictures_is_told(atelier: Atelier, tmp_path: Path) -> None:
    storage = {"ATELIER_STORAGE_URL": (tmp_path / "storage").as_uri()}
    drawn = Drawing("sdxl", "an H200", "k", {"torch": "2.12"}, {"denoising": "a"}, "2026-11-01T00:00:00+00:00")
    folder = tmp_path / "storage" / FINDINGS / FOLDER
    folder.mkdir(parents=True)
    _finding(atelier, "pictures", env=storage, level="ok", found="none drawn")
    for torch, digest in (("2.12", "a"), ("2.13", "b")):
        now = drawn._replace(versions={"torch": torch}, drew={"denoising": digest}, at=f"{drawn.at}{torch}")
        (folder / f"{torch}.json").write_bytes(now.written())
    told = "sdxl on an H200 does not draw what it drew before (denoising) with torch 2.12 → 2.13"
    _finding(atelier, "pictures", env=storage, level="warn", found=told, advice="docs/understand/same-bytes.md")


def _finding(
    atelier: Atelier,
    name: str,
    *words: str,
    env: dict[str, str] | None = None,
    level: str = "",
    found: str = "",
    advice: str = "",
) -> Finding:
    """The first finding of this name, which has the level, and words of what was found and of the advice."""
    finding = _findings(atelier, name, *words, env=env)[0]
    assert finding["level"] == (level or finding["level"]), finding
    assert found in finding["found"], finding
    assert advice in finding["advice"], finding
    return finding


def _findings(atelier: Atelier, name: str, *words: str, env: dict[str, str] | None = None) -> list[Finding]:
    ended = atelier("doctor", "--json", *words, env=env)
    assert ended.out, (ended.code, ended.err)
    found: list[Finding] = [row for row in json.loads(ended.out)["checks"] if row["name"] == name]
    failed = any(row["level"] == "fail" for row in json.loads(ended.out)["checks"])
    assert ended.code == (1 if failed else 0)
    return found
