"""What one start leaves for the next, and what `atelier up` prints."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from deployments.demo import Demo, demo_account
from deployments.output import Reporter
from serve_app.client.access import READY_FILE
from serve_app.domain.requests import Variant
from tests.composition import Resources
from tests.support import ROOT, existing

BASE = "http://127.0.0.1:8000"


async def works(resources: Resources, secret: str) -> set[Variant]:
    """The interfaces on which a key passes."""
    results = {variant: await resources.auth.authenticate(secret, variant, counted=False) for variant in Variant}
    return {variant for variant, auth in results.items() if auth.caller is not None}


async def revoke(resources: Resources, name: str) -> None:
    account = existing(await resources.accounts.get("demo"))
    (key,) = [
        key for key in await resources.api_keys.list(account.id) if key.name == f"demo {name}" and not key.revoked
    ]
    await resources.api_keys.revoke(key.id)


@pytest.fixture
async def demo(resources: Resources) -> Demo:
    """What the first start leaves."""
    return await demo_account(resources.settings, resources.for_accounts, BASE)


async def test_the_first_start_leaves_a_key_for_each_interface_and_one_for_both(
    resources: Resources, demo: Demo
) -> None:
    found = {name: await works(resources, secret) for name, secret in demo.keys.items()}
    assert found == {"a": {Variant.A}, "b": {Variant.B}, "both": set(Variant)}
    assert await resources.accounts.check_password(demo.account, demo.console_password)
    file = resources.settings.data_dir / READY_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {**demo.ready, "console_password": demo.console_password}


async def test_the_next_start_finds_the_same_at_its_own_address(resources: Resources, demo: Demo) -> None:
    again = await demo_account(resources.settings, resources.for_accounts, "http://127.0.0.1:9000")
    assert (again.keys, again.console_password) == (demo.keys, demo.console_password)
    assert again.base_url == "http://127.0.0.1:9000"


@pytest.mark.parametrize("name", ["a", "b", "both"])
async def test_a_revoked_key_is_replaced_and_the_others_stay(resources: Resources, demo: Demo, name: str) -> None:
    await revoke(resources, name)
    again = await demo_account(resources.settings, resources.for_accounts, BASE)
    assert {other for other in demo.keys if again.keys[other] != demo.keys[other]} == {name}
    assert again.console_password == demo.console_password
    assert await works(resources, again.keys[name])
    assert (await demo_account(resources.settings, resources.for_accounts, BASE)).keys == again.keys


async def test_a_lost_file_or_lost_data_is_a_first_start(
    resources: Resources, demo: Demo, redis_db: redis.Redis
) -> None:
    (resources.settings.data_dir / READY_FILE).unlink()
    second = await demo_account(resources.settings, resources.for_accounts, BASE)
    redis_db.flushall()
    third = await demo_account(resources.settings, resources.for_accounts, BASE)
    for before, after in ((demo, second), (second, third)):
        assert not set(before.keys.values()) & set(after.keys.values())
    assert all([await works(resources, secret) for secret in third.keys.values()])
    assert await resources.accounts.check_password(third.account, third.console_password)


def test_with_json_only_the_ready_line_is_printed(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    _report(Reporter(as_json=True), demo)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == demo.ready
    assert printed.out.count("\n") == 1
    assert printed.err == "atelier: it is over\n"


def test_without_json_stages_and_examples_are_printed(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    _report(Reporter(), demo)
    printed = capsys.readouterr()
    for text in ("Starting", "First image", demo.keys["a"], demo.keys["b"], demo.console_password, "curl -s", "Ctrl-C"):
        assert text in printed.out
    assert "console_url" not in printed.out
    assert printed.err == "atelier: it is over\n"


def test_each_stage_is_one_line_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().stages() as stages:
        stages.begin("Generator")
        with stages.stage("Ray"):
            pass
        stages.update("Generator", "50 %")
        stages.end("Generator", "var/first.png")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r" +\d+\.\d s", " N s", line).strip() for line in lines] == [
        "Ray N s",
        "Generator N s  var/first.png",
    ]


def test_a_terminal_shows_running_stages_with_their_progress() -> None:
    screen = _run_on_a_terminal("stages.begin('First image'); stages.update('First image', '45 %')")
    assert re.search(r"First image: 45 % +0 s", screen)


def _report(reporter: Reporter, demo: Demo) -> None:
    """Everything that `atelier up` prints."""
    reporter.info("Starting ...")
    with reporter.stages() as stages:
        stages.begin("First image")
        stages.update("First image", "50 %")
        stages.end("First image")
    reporter.ready(demo)
    reporter.welcome(demo, "model_x", data_dir=Path("var"), logs=Path("logs"))
    reporter.error("it is over")


def _run_on_a_terminal(body: str) -> str:
    """What a program prints on a pseudo-terminal."""
    program = f"from deployments.output import Reporter\nwith Reporter().stages() as stages:\n    {body}"
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=terminal) as process:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # Linux reports the closed terminal as an input/output error
            while chunk := os.read(main, 4096):
                written += chunk
        assert process.wait(timeout=60) == 0
    os.close(main)
    return written.decode()
