"""Runs the command as a user does: arguments in; output, exit code and error line out."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from typer.main import get_command
from typer.testing import CliRunner

from deployments.local import app
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.live import Live

T = TypeVar("T")
Work = Callable[[Resources], Coroutine[Any, Any, T]]


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a finished command."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        """The parsed output of `--json`."""
        assert self.code == 0, self.err
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Atelier:
    """The command, with the environment of one service."""

    settings: Settings
    env: dict[str, str]

    def __call__(self, *words: str, typed: str = "", env: dict[str, str] | None = None) -> Ended:
        result = CliRunner().invoke(app, words, input=typed, env={**self.env, **(env or {})}, prog_name="atelier")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return Ended(result.exit_code, result.stdout, result.stderr)

    def json(self, *words: str, typed: str = "") -> Any:
        return self(*words, "--json", typed=typed).facts

    def stores(self, work: "Work[T]") -> T:
        """Run something on the stores that the command works with."""

        async def opened() -> T:
            async with open_resources(self.settings) as resources:
                return await work(resources)

        return asyncio.run(opened())


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Make typer's tree of commands once: it would make it again for each call, which takes 15 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture
def atelier(settings: Settings, redis_db: redis.Redis) -> Atelier:
    env = {
        "ATELIER_DATA_DIR": str(settings.data_dir),
        "ATELIER_REDIS_URL": settings.redis_url,
        "ATELIER_CATALOG": str(settings.catalog),
        "ATELIER_BASE_URL": "",
        "ATELIER_KEY": "",
        "COLUMNS": "200",
    }
    return Atelier(settings, env)


@pytest.fixture
def ready_file(live: Live, settings: Settings) -> Path:
    """The file that `atelier up` writes into the data directory for the other commands."""
    _, secret = live.member("local")
    keys = {"a": secret, "b": secret, "both": secret}
    path = settings.data_dir / "local.json"
    path.write_text(json.dumps({"base_url": live.base_url, "console_url": "", "account": "local", "keys": keys}))
    return path
