"""What one start leaves for the next, and what a person and a program are told of it."""

import json
from pathlib import Path

import pytest
import redis

from deployments.demo import Demo, demo_account
from deployments.telling import Teller
from serve_app.cli.local import READY_FILE
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources

BASE = "http://127.0.0.1:8000"


async def works(resources: Resources, secret: str) -> set[Variant]:
    """The interfaces on which a key passes."""
    gates = {variant: await resources.accounts.gate(secret, variant, counted=False) for variant in Variant}
    return {variant for variant, gate in gates.items() if gate.caller is not None}


async def revoke(resources: Resources, name: str) -> None:
    account = await resources.accounts.account("demo")
    assert account is not None
    (key,) = [
        key for key in await resources.accounts.keys(account.id) if key.name == f"demo {name}" and not key.revoked
    ]
    await resources.accounts.revoke_key(key.id)


@pytest.fixture
async def demo(resources: Resources) -> Demo:
    """What the first start leaves."""
    return await demo_account(resources, BASE)


async def test_the_first_start_leaves_a_key_for_each_interface_and_one_for_both(
    resources: Resources, demo: Demo
) -> None:
    assert {name: await works(resources, secret) for name, secret in demo.keys.items()} == {
        "a": {Variant.A},
        "b": {Variant.B},
        "both": set(Variant),
    }
    assert await resources.accounts.check_password(demo.account, demo.console_password)
    file = resources.settings.data_dir / READY_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {**demo.ready, "console_password": demo.console_password}


async def test_the_next_start_finds_the_same_at_its_own_address(resources: Resources, demo: Demo) -> None:
    again = await demo_account(resources, "http://127.0.0.1:9000")
    assert (again.keys, again.console_password) == (demo.keys, demo.console_password)
    assert again.base_url == "http://127.0.0.1:9000"


@pytest.mark.parametrize("name", ["a", "b", "both"])
async def test_a_key_that_stopped_is_made_anew_and_the_others_stay(resources: Resources, demo: Demo, name: str) -> None:
    await revoke(resources, name)
    again = await demo_account(resources, BASE)
    assert {other for other in demo.keys if again.keys[other] != demo.keys[other]} == {name}
    assert again.console_password == demo.console_password
    assert await works(resources, again.keys[name])
    assert (await demo_account(resources, BASE)).keys == again.keys


async def test_a_lost_file_or_lost_data_is_a_first_start(
    resources: Resources, demo: Demo, redis_db: redis.Redis
) -> None:
    (resources.settings.data_dir / READY_FILE).unlink()
    second = await demo_account(resources, BASE)
    redis_db.flushall()
    third = await demo_account(resources, BASE)
    for before, after in ((demo, second), (second, third)):
        assert not set(before.keys.values()) & set(after.keys.values())
    assert all([await works(resources, secret) for secret in third.keys.values()])
    assert await resources.accounts.check_password(third.account, third.console_password)


def test_a_program_is_told_one_line_of_json_and_nothing_else(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    _tell(Teller(as_json=True), demo)
    said = capsys.readouterr()
    assert json.loads(said.out) == demo.ready
    assert said.out.count("\n") == 1
    assert said.err == "atelier: it is over\n"


def test_a_person_is_told_everything_but_json(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    _tell(Teller(), demo)
    said = capsys.readouterr()
    for word in ("Starting", "Drawing", demo.keys["a"], demo.keys["b"], demo.console_password, "curl -s", "Ctrl-C"):
        assert word in said.out
    assert "console_url" not in said.out
    assert said.err == "atelier: it is over\n"


def _tell(teller: Teller, demo: Demo) -> None:
    """A whole life of `atelier up`."""
    teller.say("Starting ...")
    teller.ready(demo)
    teller.drawing()(50)
    teller.welcome(demo, "model_x", data_dir=Path("var"), logs=Path("logs"))
    teller.complain("it is over")
