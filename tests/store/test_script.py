"""Scripts are called by the names of their arguments, checked against each script's own header."""

import re
from typing import Any

import pytest
import redis

from benchmarks.jobs_queue import Shape, accept_args, claim_args
from serve_app.store.redis_client import connect
from serve_app.store.script import Argument, Script, load_script
from tests.support import ROOT

FILES = {f"{path.parts[-3]}/{path.stem}": path for path in (ROOT / "serve_app").glob("*/scripts/*.lua")}
LAYERS = ("webhooks", "jobs", "loras", "accounts", "store")
"""A script includes files of its own concern and of those to the right."""


def _includes(name: str) -> list[str]:
    found = re.findall(r"^-- include (\S+)$", FILES[name].read_text(), re.MULTILINE)
    return [included if "/" in included else f"{name.partition('/')[0]}/{included}" for included in found]


SCRIPTS = sorted(FILES.keys() - {"store/common"} - {included for name in FILES for included in _includes(name)})
VALUES: dict[str, Argument] = {"text": "x", "number": 1, "flag": True, "list": ["y", 2, 3]}


class Silent:
    """Any call to a server fails the test: nothing may be sent."""

    async def execute_write(self, *args: object) -> Any:
        raise AssertionError(f"{args} was sent")


def _args(name: str) -> dict[str, Argument]:
    return {parameter.name: VALUES[parameter.type] for parameter in load_script(name).parameters}


def test_a_scripts_own_name_says_which_it_is() -> None:
    assert len({name.rpartition("/")[2] for name in FILES}) == len(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("operations/")])
def test_a_script_includes_only_files_of_its_own_concern_and_of_those_below(name: str) -> None:
    below = LAYERS[LAYERS.index(name.partition("/")[0]) :]
    assert {included.partition("/")[0] for included in _includes(name)} <= set(below)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_has_one_name_and_is_used(name: str) -> None:
    source = load_script(name)
    assert not source.text.startswith("#!"), "Redis 6.2 has no such scripts"
    assert source.text.count("local P = KEYS[1]") == 1
    names = [parameter.name for parameter in source.parameters]
    assert names
    assert len(names) == len(set(names))
    assert all(parameter.type in VALUES for parameter in source.parameters)
    assert all(parameter.type != "list" for parameter in source.parameters[:-1])
    code = re.sub(r"--.*", "", source.text)
    for each in names:
        assert len(re.findall(rf"\b{each}\b", code)) > 1, f"{each} is never used"
    assert "ARGV" not in FILES[name].read_text(), "arguments are read by name"


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_missing_or_unknown_argument_is_refused_before_anything_is_sent(name: str) -> None:
    script, args = Script(Silent(), name), _args(name)  # pyright: ignore[reportArgumentType]
    for each in args:
        with pytest.raises(TypeError, match=rf"{load_script(name).name}\.lua: missing \['{each}'\], unknown \[\]"):
            await script(**{other: value for other, value in args.items() if other != each})
    with pytest.raises(TypeError, match=rf"{load_script(name).name}\.lua: missing \[\], unknown \['color'\]"):
        await script(**args, color="red")


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_argument_of_another_type_is_refused(name: str) -> None:
    script, args = Script(Silent(), name), _args(name)  # pyright: ignore[reportArgumentType]
    for parameter in load_script(name).parameters:
        for type_name, value in VALUES.items():
            if type_name != parameter.type:
                with pytest.raises(TypeError, match=f"{parameter.name} must be a {parameter.type}"):
                    await script(**{**args, parameter.name: value})


@pytest.mark.script_text
async def test_arguments_reach_the_script_by_name_in_any_order(redis_url: str, redis_db: redis.Redis) -> None:
    client = connect(redis_url)
    answer = "return {key_id, digest, hint, account, name, interfaces, tostring(life_ms), life_ms}"
    script = Script(client, "accounts/create_key", rewrite=lambda _, text: text.split("if redis.call")[0] + answer)
    args: dict[str, Argument] = {**dict.fromkeys(("scopes", "adapters", "user"), ""), "max_keys": 1, "pepper": 1}
    args |= {"name": "n", "life_ms": 7, "key_id": "k", "interfaces": None, "limit": None}
    found = await script(**args, digest="d", hint="h", account="a")
    assert found == ["k", "d", "h", "a", "n", "", "7", 7]
    assert (await script(**{**args, "life_ms": None}, digest="d", hint="h", account="a"))[-1] == "nil"
    await client.aclose()


def test_the_benchmark_of_the_queue_names_every_argument_of_its_scripts() -> None:
    shape = Shape(queued=1, accounts=1, adapters=1, resident=1)
    assert accept_args(1, shape)
    assert claim_args(1, 8, ["a"])
