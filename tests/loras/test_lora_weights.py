"""Stored weights go with the last LoRA that has them, and stay for a registration that needs them."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from serve_app.loras.registration import remove_lora
from serve_app.loras.stored_weights import LoraFiles
from serve_app.store.keys import redis_key
from tests.composition import Resources
from tests.support import lora_record, wait_until, write_safetensors

SHA256 = "0a" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "mine.safetensors")


async def _store(resources: Resources, file: Path) -> str:
    return await LoraFiles(resources.settings).put(SHA256, {"": file})


async def _record(resources: Resources, uri: str, lora_id: str = "model_mine") -> None:
    await resources.adapter_registry.register(lora_record(uri, id=lora_id, sha256=SHA256))


def _is_stored(resources: Resources) -> bool:
    return (resources.settings.data_dir / "images" / "loras" / f"{SHA256}.safetensors").exists()


async def test_weights_that_are_registered_anew_outlive_the_removal_of_the_last_lora_that_had_them(
    resources: Resources, file: Path
) -> None:
    uri = await _store(resources, file)
    await _record(resources, uri)
    async with resources.lora_weights.held(uri):
        await _store(resources, file)
        assert await remove_lora(resources.adapter_registry, resources.lora_weights, "model_mine") == "removed"
        await _record(resources, uri, "model_again")
    assert _is_stored(resources)
    assert await remove_lora(resources.adapter_registry, resources.lora_weights, "model_again") == "removed"
    assert not _is_stored(resources)


async def test_a_registration_waits_while_the_same_weights_are_removed(resources: Resources, file: Path) -> None:
    uri = await _store(resources, file)
    await _record(resources, uri)
    assert (await resources.adapter_registry.remove("model_mine")).weights == uri
    assert await resources.lora_weights.due() == [uri]
    entered = asyncio.Event()

    async def register() -> None:
        async with resources.lora_weights.held(uri):
            entered.set()
            await _record(resources, await _store(resources, file), "model_again")

    registration = asyncio.create_task(register())
    assert not await resources.lora_weights.hold(uri, "another")
    assert not entered.is_set()
    await LoraFiles(resources.settings).delete(uri)
    await resources.lora_weights.gone(uri)
    await registration
    assert _is_stored(resources)


async def test_what_a_registration_that_failed_or_was_killed_stored_is_removed_and_nothing_else(
    resources: Resources, file: Path
) -> None:
    uri = await _store(resources, file)
    assert await resources.lora_weights.remove_unused() == 0, "of a Redis that knows nothing"
    with pytest.raises(ValueError, match="the record"):
        async with resources.lora_weights.held(uri):
            raise ValueError("the record was refused")
    assert not _is_stored(resources)
    await _store(resources, file)
    assert await resources.lora_weights.hold(uri, "killed", life=timedelta(milliseconds=1))
    await wait_until(lambda: resources.lora_weights.remove_unused())
    assert not _is_stored(resources)


async def test_of_two_registrations_the_one_that_fails_takes_nothing_from_the_other(
    resources: Resources, file: Path
) -> None:
    uri = await _store(resources, file)
    async with resources.lora_weights.held(uri):
        with pytest.raises(ValueError, match="refused"):
            async with resources.lora_weights.held(uri):
                raise ValueError("refused")
        await _record(resources, uri)
    assert _is_stored(resources)


async def test_listed_weights_that_a_lora_has_by_now_are_kept(
    resources: Resources, file: Path, redis_db: redis.Redis
) -> None:
    """Weights may be on the list although a LoRA has them: an older version registers without holding them."""
    uri = await _store(resources, file)
    await _record(resources, uri)
    redis_db.zadd(redis_key("loras_unused"), {uri: 1})
    assert await resources.lora_weights.remove_unused() == 0
    assert not redis_db.exists(redis_key("loras_unused"))
    assert _is_stored(resources)
