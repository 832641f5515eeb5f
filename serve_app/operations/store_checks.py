"""Checks secrets, Redis, the storage of images, the catalog and the weights of adapters, alone or all at once."""

import asyncio
import errno
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_app.domain.canary import FOLDER, Drawing, latest_differences
from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.durations import rounded_duration
from serve_app.domain.errors import AdapterUnavailable, AtelierError, StoreUnavailable
from serve_app.jobs.images import ImageStore
from serve_app.loras.catalog_file import CatalogError, add_digests, read_catalog
from serve_app.loras.weights import WeightStore
from serve_app.marking.certificates import BadMarking
from serve_app.model_folder import index_file
from serve_app.operations.checks import (
    Check,
    check_data_directory,
    check_disks,
    check_privacy,
    check_versions,
    fail,
    ok,
    warn,
)
from serve_app.settings import Settings
from serve_app.store.embedded_redis import is_service_up, require_readable_files, running_redis
from serve_app.store.measures import RedisMemory
from serve_app.store.redis_address import KINDS
from serve_app.store.redis_client import connect_sync
from serve_app.store.redis_copy import COPY_DUE, ask_copy_age, copy_age_from
from serve_app.store.redis_inspection import DURABLE, RedisFacts, inspect_redis, keys_by_pepper
from serve_app.store.redis_process import server_binary, version_of
from serve_app.store.storage import FINDINGS, StoredFiles

MEMORY_WARNING = 0.8
"""The doctor warns from this share of maxmemory on, as the alert rule does: before new jobs are refused."""
STORAGE_ADVICE = (
    "check ATELIER_STORAGE_URL, ATELIER_STORAGE_OPTIONS and the credentials' rights to write, read and delete"
)


def check_secrets(settings: Settings) -> Iterable[Check]:
    """Check where the pepper and the signing keys come from. Without the pepper no API key is valid."""
    local = settings.data_dir / "secrets.json"
    if settings.has_pepper and settings.signing_keys:
        yield ok("secrets", "pepper and signing keys are set")
    elif settings.redis_url:
        advice = "when several machines share a Redis, set the same ATELIER_PEPPER and ATELIER_SIGNING_KEYS on each"
        yield warn("secrets", f"{local} holds the unset secrets, on this machine only", advice)
    elif local.exists() and stat.S_IMODE(local.stat().st_mode) & 0o077:
        yield fail("secrets", f"{local} can be read by others", f"chmod 600 {local}")
    else:
        yield ok("secrets", f"{local}, one machine" if local.exists() else f"{local} (created at the first start)")


def check_redis(settings: Settings) -> Iterable[Check]:
    url = settings.redis_url
    if not url:
        try:
            embedded = running_redis(settings.data_dir)
        except StoreUnavailable as error:
            yield fail("redis", error.message, "look at its disk; whoever uses it replaces it after 30 s of silence")
            return
        if embedded is None:
            yield from _not_running(settings)
            return
        url = embedded.url
    try:
        facts = inspect_redis(url)
    except (StoreUnavailable, ValueError) as error:
        yield fail("redis", str(error), f"--redis-url and REDIS_URL take {KINDS}")
        return
    yield ok("redis", facts.release)
    yield from _memory(facts)
    if facts.settings is None and facts.lossy:
        yield fail("redis durability", f"this Redis {facts.lossy}", "accepted jobs can be lost")
    elif facts.settings is None:
        advice = f"make sure that it has {_wanted(DURABLE)}"
        yield warn("redis durability", "this Redis user may not read CONFIG", advice)
    elif facts.wrong:
        found = ", ".join(f"{name} {facts.settings.get(name, '?')}" for name in facts.wrong)
        yield fail("redis durability", found, f"accepted jobs can be lost; set {_wanted(facts.wrong)}")
    else:
        yield ok("redis durability", _wanted(facts.settings))
    yield from _copies(url)
    yield from _peppers(settings, url)


def _copies(url: str) -> Iterable[Check]:
    """Check that Redis was copied lately, by whatever runs `atelier backup`."""
    with connect_sync(url) as client:
        pipeline = client.pipeline(transaction=False)
        ask_copy_age(pipeline)
        age = copy_age_from(pipeline.execute())
    if age is None:
        yield ok("backup", "there is no account yet, and nothing to copy")
    elif age > COPY_DUE:
        yield warn("backup", f"Redis was not copied for {rounded_duration(age)}", "run `atelier backup` every day")
    else:
        yield ok("backup", f"the last copy, or the first account, is {rounded_duration(age)} old")


def _memory(facts: RedisFacts) -> Iterable[Check]:
    used, limit = facts.used_bytes, facts.limit_bytes
    if not limit:
        advice = "set maxmemory (70 % of what it may use): near it new jobs are refused, in place of Redis being killed"
        yield warn("redis memory", f"{used / 1e6:.0f} MB in use, without a limit", advice)
        return
    found = f"{used / 1e6:.0f} of {limit / 1e6:.0f} MB in use ({used / limit:.0%})"
    more = "give it more memory and maxmemory, or shorten ATELIER_RETENTION: from 90 % on new jobs are refused"
    if RedisMemory(used, limit).is_short:
        yield fail("redis memory", f"{found}: new jobs are refused", more)
    elif used > limit * MEMORY_WARNING:
        yield warn("redis memory", found, more)
    else:
        yield ok("redis memory", found)


def _peppers(settings: Settings, url: str) -> Iterable[Check]:
    """Check that every key's pepper is listed; an older one can go once no key uses it."""
    try:
        found = keys_by_pepper(url)
    except StoreUnavailable:
        return
    is_made = settings.has_pepper or (settings.data_dir / "secrets.json").exists()
    versions = settings.key_peppers if is_made else {1: b""}
    if lost := sum(number for version, number in found.items() if version not in versions):
        yield fail("pepper", f"{lost} API keys use a pepper version that is not listed", "list it in ATELIER_PEPPERS")
    newest, *older = versions
    for version in older:
        number = found.get(version, 0)
        state = f"{number} active API keys still use it" if number else "no active API key uses it"
        yield ok(f"pepper {version}", state)
    if older:
        yield ok(f"pepper {newest}", f"{found.get(newest, 0)} active API keys; new keys use it")


def _not_running(settings: Settings) -> Iterable[Check]:
    """Check the embedded Redis that does not run: under a running service it has ended, else it will be started."""
    if is_service_up(settings.data_dir):
        log = settings.data_dir.resolve() / "redis" / "redis.log"
        advice = f"see the end of {log}; with a full disk it stops, and starts again once there is space"
        yield fail("redis", "the service runs, and its embedded Redis does not", advice)
        return
    try:
        binary = server_binary()
        require_readable_files(settings.data_dir.resolve() / "redis", binary)
    except StoreUnavailable as error:
        yield fail("redis", error.message, "see docs/operate/redis-and-storage.md")
        return
    version = ".".join(map(str, version_of(binary)))
    yield ok("redis", f"not running; starts with the service from {binary} ({version})")


def _wanted(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


async def check_storage(settings: Settings) -> list[Check]:
    """Write, read and delete one small object, as a worker does."""
    if not settings.storage_url and not settings.data_dir.exists():
        return [ok("storage", f"{settings.storage} (created at the first start)")]
    name = f"images/doctor/{datetime.now(UTC):%Y/%m/%d}/{secrets.token_hex(8)}/a1-0.png"
    probe = secrets.token_bytes(64)
    try:
        images = ImageStore(settings)
        uri = await images.put(name, probe)
        same = await images.get(uri) == probe
        await images.delete(uri)
    except (AtelierError, ImportError, ValueError) as error:
        is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "its disk is full: free some space" if is_full else STORAGE_ADVICE
        return [fail("storage", f"{settings.storage}: {error}", advice)]
    if not same:
        found = f"{settings.storage}: the object read differs from the object written"
        return [fail("storage", found, "use another storage")]
    return [ok("storage", f"{settings.storage}: written, read, deleted"), *await _check_pictures(settings)]


async def _check_pictures(settings: Settings) -> Iterable[Check]:
    """Say of each base model and card whether the last update changed what it draws, as its workers found."""
    advice = "see docs/understand/same-bytes.md: images that customers keep seeds of come out otherwise now"
    try:
        kept = Drawing.read(await asyncio.to_thread(StoredFiles(settings, FINDINGS).read, FOLDER))
    except OSError as error:
        return [warn("pictures", str(error), STORAGE_ADVICE)]
    return [warn("pictures", changed, advice) for changed in latest_differences(kept)] or [
        ok("pictures", f"{len(kept)} drawn at starts, as before" if kept else "none drawn at a start yet")
    ]


async def check_catalog(settings: Settings, *, limit: int | None, weights_within: timedelta) -> list[Check]:
    try:
        base_models, adapters, set_aside = await asyncio.to_thread(read_catalog, settings.catalog)
    except CatalogError as error:
        return [fail("catalog", str(error), "correct the file, or set ATELIER_CATALOG to another")]
    found = [ok("catalog", f"{settings.catalog}: base models {len(base_models)}, adapters {len(adapters)}")]
    found += [fail("catalog", row.reason, "correct the row; the others are served") for row in set_aside]
    found += [finding for model in base_models.values() for finding in check_base_model(model)]
    return found + await _check_weights(settings, list(adapters.values()), limit, weights_within)


def check_base_model(model: BaseModel) -> Iterable[Check]:
    """Check that the files of a base model are there; nothing is loaded."""
    kind = "safetensors file" if model.config else "diffusers folder"
    if not Path(model.source).exists():
        yield fail("base model", f"{model.id}: nothing at {model.source}", f"put the {kind} there")
    if model.config and not index_file(Path(model.config)).is_file():
        found = f"{model.id}: no model_index.json in {model.config}"
        yield fail("base model", found, "put a diffusers folder of the same architecture there; it needs no weights")
    named = (("VAE", "vae", model.vae), ("text encoder", "text_encoder", model.text_encoder),
             ("tokenizer", "tokenizer", model.tokenizer))  # fmt: skip
    for part, field, place in named:
        if place and not Path(place).exists():
            yield fail("base model", f"{model.id}: no {part} at {place}", f"put it there, or correct `{field}:`")


async def _check_weights(
    settings: Settings, adapters: list[Adapter], limit: int | None, within: timedelta
) -> list[Check]:
    """Fetch adapters as a replica does, into a temporary directory; none is begun once `within` has passed."""
    options = settings.storage_options
    chosen, unreadable, _ = await asyncio.to_thread(add_digests, adapters[:limit], {}, options)
    refused = [fail("catalog", row.reason, "put the file there") for row in unreadable]
    began, read = time.monotonic(), 0
    for adapter in chosen:
        if time.monotonic() - began >= within.total_seconds():
            break
        read += 1
        with TemporaryDirectory() as place:
            try:
                await WeightStore(settings.model_copy(update={"data_dir": Path(place)})).fetch(adapter)
            except AdapterUnavailable as error:
                advice = f"put the right file at {adapter.file}"
                refused.append(fail("weights", f"{adapter.name}: {error.message}", advice))
    if refused or not chosen:
        return refused
    rest = f" of {len(adapters)} (`atelier doctor --all-weights` checks all)" if read < len(adapters) else ""
    return [ok("weights", f"{read}{rest} adapters read and checked")]


EXPIRES_SOON = timedelta(days=30)


def check_marking(settings: Settings) -> Iterable[Check]:
    """Check the certificate that signs images, where they are marked."""
    if not settings.mark_images:
        return
    from serve_app.marking.marker import usable_credentials  # here, so that commands start without Pillow

    try:
        found = usable_credentials(settings)
    except BadMarking as error:
        if settings.redis_url and not any(file.exists() for file in settings.marking_files):
            yield warn("marking", error.message, "fine on a machine without workers; others make no images")
        else:
            yield fail("marking", error.message, "correct that: workers take no jobs without a certificate that signs")
        return
    told = f"signed by {found.organization}, until {found.ends:%Y-%m-%d}"
    if found.is_development:
        yield warn("marking", told, "fine to try it; customers' images need a certificate that others trust")
    elif found.ends - datetime.now(UTC) < EXPIRES_SOON:
        yield warn("marking", told, "get the next one now: once it has ended, workers take no jobs")
    else:
        yield ok("marking", told)


MOST_WEIGHTS, WEIGHTS_WITHIN = 20, timedelta(seconds=10)
"""A report reads at most this many files of LoRAs, for at most this long, so that a person can wait for it."""


async def check_service(
    settings: Settings, *, most_weights: int | None = MOST_WEIGHTS, weights_within: timedelta = WEIGHTS_WITHIN
) -> list[Check]:
    """Check this machine and the stores. Every adapter is read where `most_weights` is None."""

    def check_machine() -> list[Check]:
        return [
            *check_versions(),
            *check_data_directory(settings),
            *check_disks(settings),
            *check_privacy(settings),
            *check_secrets(settings),
            *check_redis(settings),
            *check_marking(settings),
        ]

    machine, storage = await asyncio.to_thread(check_machine), await check_storage(settings)
    return [*machine, *storage, *await check_catalog(settings, limit=most_weights, weights_within=weights_within)]
