"""Lua scripts: loaded from files, called by the names of their arguments, run by digest."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.keys import PREFIX
from serve_app.store.redis_client import RedisClient

REPLICA_TIMEOUT_MS = 1_000
SLOW_S = 0.025
"""A call that takes as long as this is measured by the name of its script."""

Argument = str | bytes | int | float | bool | list[str] | list[str | int] | None
Rewrite = Callable[[str, str], str]
"""A function of a script's name and text that returns another text. Tests move the clock by it and plant defects."""

_ROOT = Path(__file__).parents[1]
_INCLUDE, _ARGS = "-- include ", "-- args: "

_TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str, bytes, NoneType),
    "number": (int, float, NoneType),
    "flag": (bool,),
    "list": (list,),
}
_LUA: Mapping[str, str] = {
    "text": "ARGV[{0}]",
    "number": "tonumber(ARGV[{0}])",
    "flag": "ARGV[{0}] == '1'",
    "list": "{{unpack(ARGV, {0})}}",
}
"""How each type is read from its place. None is sent as an empty text, which is nil for a number."""


class Parameter(NamedTuple):
    """One argument of a script, as its header names it: `attempt:number`; without a type it is text."""

    name: str
    type: str

    def check(self, value: Argument) -> None:
        """Check a value. Raises `TypeError` for one of another type."""
        is_flag = isinstance(value, bool)  # a bool is an int, too
        if is_flag != (self.type == "flag") or not isinstance(value, _TYPES[self.type]):
            raise TypeError(f"{self.name} must be a {self.type}, not {type(value).__name__}")


class ScriptSource(NamedTuple):
    """A script as it is sent, and what it takes."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    names: frozenset[str]

    def encode(self, args: Mapping[str, Argument]) -> list[str | bytes | int | float]:
        """Return the arguments in the script's order.

        Raises `TypeError` for one that is missing, unknown or of another type.
        """
        if self.names.symmetric_difference(args):
            missing, unknown = self.names.difference(args), set(args).difference(self.names)
            raise TypeError(f"{self.name}.lua: missing {sorted(missing)}, unknown {sorted(unknown)}")
        encoded: list[str | bytes | int | float] = []
        for parameter in self.parameters:
            value = args[parameter.name]
            parameter.check(value)
            if isinstance(value, list):
                encoded += value
            else:
                encoded.append("" if value is None else int(value) if isinstance(value, bool) else value)
        return encoded


@cache
def load_script(name: str) -> ScriptSource:
    """Read a script by its concern and its own name, as in `jobs/accept`.

    The text is what all scripts share, the arguments as locals, the included files and the script's own lines. A file
    is included by a line `-- include file`, or `-- include concern/file` from the folder of a concern below.
    """
    parts = _with_included(name)
    declared = [item for text in parts.values() for line in _lines(text, _ARGS) for item in line.split(",")]
    parameters = tuple(sorted(map(_parameter, declared), key=lambda each: each.type == "list"))  # a list comes last
    text = "".join((_read("store/common"), _locals(parameters), *parts.values()))
    return ScriptSource(
        name.rpartition("/")[2], text, parameters, frozenset(parameter.name for parameter in parameters)
    )


def _with_included(name: str) -> dict[str, str]:
    """Return the texts of a script and of what it includes, each once and after all that it needs itself."""
    own, concern = _read(name), name.partition("/")[0]
    parts: dict[str, str] = {}
    for included in _lines(own, _INCLUDE):
        parts |= _with_included(included if "/" in included else f"{concern}/{included}")
    return {**parts, name: own}


def _read(name: str) -> str:
    concern, _, script = name.partition("/")
    return (_ROOT / concern / "scripts" / f"{script}.lua").read_text()


def _lines(text: str, start: str) -> Iterator[str]:
    return (line.removeprefix(start) for line in text.splitlines() if line.startswith(start))


def _parameter(item: str) -> Parameter:
    name, _, type_name = item.strip().partition(":")
    return Parameter(name, type_name or "text")


def _locals(parameters: Sequence[Parameter]) -> str:
    names = ", ".join(parameter.name for parameter in parameters)
    values = ", ".join(_LUA[parameter.type].format(place) for place, parameter in enumerate(parameters, start=1))
    return f"local {names} = {values}\n"


class Script:
    """One change of state, or one read. A server that forgot the script is sent its text again.

    The digest pins the script to this version of the code, so that two versions can run side by side during a roll-out.
    """

    def __init__(self, client: RedisClient, name: str, rewrite: Rewrite | None = None, *, writes: bool = True) -> None:
        """Load the script `concern/name`.

        Calls go over the connection that all such scripts of the process share, those with `writes=False` over the
        reads' (`redis_client.py`). So every script must be safe to run twice: one that loses its answer is sent again.
        """
        self._client = client
        self._execute = client.execute_write if writes else client.execute_read
        self._source = load_script(name)
        self.text = rewrite(name, self._source.text) if rewrite else self._source.text
        self._sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, **args: Argument) -> Any:
        """Run the script and return its answer.

        Raises `TypeError`, before anything is sent, for an argument that is missing, unknown or of another type.
        """
        encoded = self._source.encode(args)
        began = time.perf_counter()
        try:
            return await self._execute("EVALSHA", self._sha, 1, PREFIX, *encoded)
        except NoScriptError:
            return await self._client.eval(self.text, 1, PREFIX, *encoded)
        finally:
            if (took := time.perf_counter() - began) >= SLOW_S:
                self._client.slow_scripts.append((self._source.name, took))

    async def on_replicas(self, replicas: int, **args: Argument) -> Any:
        """Run the script. Return once `replicas` Redis replicas have the writes.

        Raises `StoreUnavailable` when they do not in time: the change may have happened, and asking again is safe.
        """
        # in a pipeline, because WAIT is about the writes of its own connection
        pipeline = self._client.pipeline(transaction=False)
        pipeline.eval(self.text, 1, PREFIX, *self._source.encode(args))
        pipeline.wait(replicas, REPLICA_TIMEOUT_MS)
        answer, confirmed = await pipeline.execute()
        if confirmed < replicas:
            raise StoreUnavailable(f"{confirmed} of {replicas} replicas have the job")
        return answer


def pairs(flat: Sequence[str]) -> Mapping[str, str]:
    """Read a hash from a script's answer: names and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
