"""Exit codes, one line on stderr for every error, and nothing left running or on disk."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deployments.local import app
from serve_app.client.commands import COMMANDS as ACCOUNT_COMMANDS
from serve_app.client.commands import OPERATORS
from serve_app.store.embedded_redis import running_redis
from tests.cli.conftest import Atelier
from tests.support import write_catalog


def _commands(group: Any, *words: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(group, "commands"):
        yield " ".join(words), group
    for name, each in getattr(group, "commands", {}).items():
        yield from _commands(each, *words, name)


ACCOUNTS = {*ACCOUNT_COMMANDS, "mcp"} - {*OPERATORS}
COMMANDS = {name: each for name, each in _commands(typer.main.get_command(app)) if name not in ACCOUNTS}
"""All but those of an account, which ask the service by its address."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_the_shared_options_and_shows_its_whole_help(atelier: Atelier, command: str) -> None:
    ended = atelier(*command.split(), "--help", env={"COLUMNS": "400"})
    assert ended.code == 0
    for option in ("--json", "--data-dir", "--redis-url"):
        assert option in ended.out
    said = [(each.help or "").replace("`", "") for each in (COMMANDS[command], *COMMANDS[command].params)]
    shown = " ".join(ended.out.replace("│", " ").split())
    assert [text for text in said if " ".join(text.split()) not in shown] == []


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("accounts", 2, ""),
        ("accounts create", 2, "name"),
        ("accounts create x --plan-a gold", 2, "plan_a: must be one of basic, professional, enterprise"),
        ("accounts create x --color red", 2, "--color"),
        ("accounts create \x07", 2, "name"),
        ("accounts set-plan x", 2, "--plan-a"),
        ("accounts set-plan nobody --plan-a basic", 1, "no account 'nobody'"),
        ("accounts set-password nobody --password-stdin", 1, "no account 'nobody'"),
        ("keys create nobody", 1, "no account 'nobody'"),
        ("keys create x --interfaces a,c", 2, "--interfaces"),
        ("keys create x --expires-in soon", 2, "--expires-in"),
        ("keys create x --expires-in 0d", 2, "--expires-in"),
        ("keys edit key_nobody --limit 5", 1, "key_nobody"),
        ("keys edit key_nobody --limit -5", 2, "--limit"),
        ("keys roll key_x", 1, "no active key 'key_x'"),
        ("keys roll key_x --grace 1", 2, "--grace"),
        ("keys revoke key_x", 1, "no key 'key_x'"),
        ("loras grant nothing x", 1, "no adapter 'nothing'"),
        ("loras add nowhere.safetensors --base pocket", 2, "nowhere.safetensors does not exist"),
        ("loras add s3://acme/x.safetensors --base pocket", 1, "source: fetching is not enabled"),
        ("jobs show gen_x", 1, "no job 'gen_x'"),
        ("jobs cancel gen_x", 1, "no job 'gen_x'"),
        ("jobs requeue gen_x", 1, "gen_x is not a dead job"),
        ("jobs list --state happy", 2, "--state"),
        ("jobs list --limit 0", 2, "--limit"),
        ("jobs list --redis-url nonsense", 2, "REDIS_URL"),
        ("jobs list --redis-url redis://127.0.0.1:port", 2, "REDIS_URL"),
        pytest.param("jobs list --redis-url redis://127.0.0.1:9", 1, "cannot be reached", marks=pytest.mark.slow),
        ("doctor --port 99999", 2, "--port"),
        ("audit --since tomorrow", 2, "tomorrow"),
        ("audit --account nobody", 1, "nobody"),
        ("usage --sometimes", 2, "--sometimes"),
        ("usage --days 401", 2, "--days"),
        ("usage --account nobody", 1, "nobody"),
        ("jobs drop gen_x", 1, "gen_x is not a dead job"),
        ("paint", 2, "paint"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(atelier: Atelier, words: str, code: int, error: str) -> None:
    ended = atelier(*words.split(" "))
    assert ended.code == code
    assert error in ended.err
    assert ended.err.count("\n") == (1 if error else 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ATELIER_RETENTION", "soon"),
        ("ATELIER_MAX_QUEUED", "0"),
        ("ATELIER_STORAGE_OPTIONS", "not json"),
        ("ATELIER_STORAGE_URL", "carrier-pigeon://images"),
        ("ATELIER_STORAGE_URL", "s3//bucket/images"),
        ("ATELIER_STORAGE_URL", "file://images"),
        ("ATELIER_PLANS", "/nowhere/plans.yaml"),
        ("ATELIER_CATALOG", "/nowhere/catalog.yaml"),
    ],
)
def test_a_bad_setting_is_named_and_nothing_is_written(
    atelier: Atelier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    place = tmp_path / "working directory"
    place.mkdir()
    monkeypatch.chdir(place)
    ended = atelier("accounts", "list", env={name: value})
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert name.removeprefix("ATELIER_").lower() in ended.err.lower()
    atelier("doctor", env={name: value})
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("password", ["short", "", "x" * 129])
def test_a_password_of_a_wrong_length_is_a_mistake_and_is_not_repeated(atelier: Atelier, password: str) -> None:
    ended = atelier("accounts", "create", "acme", "--password-stdin", typed=f"{password}\n")
    assert ended.code == 2
    assert "12 to 128" in ended.err
    assert not password or password not in ended.err


@pytest.mark.parametrize("words", [("accounts", "list"), ("accounts", "create", "x"), ("operators", "create", "x")])
def test_a_command_without_a_service_creates_nothing(atelier: Atelier, tmp_path: Path, words: tuple[str, ...]) -> None:
    place = tmp_path / "empty"
    ended = atelier(*words, "--data-dir", str(place), env={"ATELIER_REDIS_URL": ""})
    assert ended.code == 1
    assert "atelier up" in ended.err
    assert not place.exists()


def test_an_account_is_created_while_the_service_is_down_and_nothing_stays_running(
    atelier: Atelier, tmp_path: Path
) -> None:
    place, env = tmp_path / "down", {"ATELIER_REDIS_URL": ""}
    (place / "redis").mkdir(parents=True)
    assert atelier("accounts", "create", "acme", "--data-dir", str(place), env=env).code == 0
    assert running_redis(place) is None
    listed = atelier("accounts", "list", "--data-dir", str(place), env=env)
    assert "acme" in listed.out
    assert running_redis(place) is None


def test_version(atelier: Atelier) -> None:
    assert atelier("--version").out.startswith("atelier ")


@pytest.mark.slow
def test_a_real_process_ends_the_same_way(tmp_path: Path) -> None:
    """It prints no traceback, and imports no slow library."""
    program = "from serve_app.cli import app; app(prog_name='atelier')"
    words = ["accounts", "list", "--data-dir", str(tmp_path), "--redis-url", "redis://127.0.0.1:9"]
    env = {"ATELIER_CATALOG": str(write_catalog(tmp_path / "catalog")), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("atelier: Redis at 127.0.0.1:9 cannot be reached (")
    loading = (
        "import sys\nclass CtrlC:\n def find_spec(name, *_):\n  if name == 'serve_app.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC)\nfrom deployments.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", loading, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    heavy = "import serve_app.cli, sys; print({'torch', 'ray', 'diffusers', 'PIL'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"
