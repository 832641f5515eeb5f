"""Backs up and restores Redis and the local secrets, and lists the storage's objects."""

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.atomic_files import write_atomically
from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import UnreadableRecord
from serve_app.settings import Settings
from serve_app.stores.backup_files import SECRETS, BackupError, BackupFiles
from serve_app.stores.compact_form import unpack
from serve_app.stores.images import IMAGES, ImageStore
from serve_app.stores.lora_files import LORAS
from serve_app.stores.records import read_images
from serve_app.stores.redis_copy import CopiedKey, RedisCopy
from serve_app.stores.redis_keys import redis_key

PART = 10_000
"""Keys of one file: about 10 MB."""
_OBJECT = re.compile(rf"(?:.*/)?((?:{IMAGES}|{LORAS})/.+)")
"""A URI that a record names, wherever the storage was then, and the object's name in any."""


@dataclass(frozen=True, kw_only=True)
class BackupFacts:
    """What a backup holds, and what of it is missing or unusable here."""

    made_at: datetime
    keys: int
    jobs: int
    objects: int
    missing: Sequence[str] = ()
    problems: Sequence[str] = ()


def make_backup(settings: Settings, redis_url: str, place: str, *, pause: bool) -> BackupFacts:
    """Copy all keys at one moment. Raises `BackupError`, `StoreUnavailable`."""
    files = BackupFiles(place, settings.storage_options)
    if files.is_there():
        raise BackupError(f"{place} already holds a backup: choose another folder")
    pepper = _fingerprint(settings)  # makes the local secrets where there are none yet
    keys, jobs, parts = 0, 0, 0
    objects: set[str] = set()
    waiting: list[CopiedKey] = []
    with RedisCopy(redis_url).open() as server:
        version, now_ms = server.facts()
        for batch in server.read(pause=pause):
            waiting += batch
            keys += len(batch)
            for key in batch:
                jobs += key.name.startswith(redis_key("job", ""))
                objects.update(_objects(key))
            if len(waiting) >= PART:
                files.write_keys(parts := parts + 1, waiting)
                waiting = []
        files.write_keys(parts + 1, waiting)
    files.write_objects(objects)
    local = settings.data_dir / SECRETS
    if local.exists():
        files.write_secrets(local.read_text())
    facts = {"made_at": from_epoch_ms(now_ms).isoformat(), "redis": version, "pepper": pepper}
    files.write_manifest({**facts, "keys": keys, "jobs": jobs, "objects": len(objects)})
    return BackupFacts(made_at=from_epoch_ms(now_ms), keys=keys, jobs=jobs, objects=len(objects))


async def check_backup(settings: Settings, place: str) -> BackupFacts:
    """Check every file by its digest, and look for every object in the storage.

    Raises `BackupError`, `StoreUnavailable`.
    """
    files = BackupFiles(place, settings.storage_options)
    manifest = files.manifest()
    keys = sum(len(batch) for batch in files.keys(manifest))
    if keys != manifest["keys"]:
        raise BackupError(f"{keys} keys are there of {manifest['keys']}")
    images = ImageStore(settings)
    stored = {*await images.names(IMAGES), *await images.names(LORAS)}
    stored |= {name.rpartition("/")[0] for name in stored if name.startswith(LORAS)}  # a folder of PEFT
    objects = files.objects(manifest)
    problems: list[str] = []
    if _secrets_differ(settings, manifest, files):
        problems.append("the pepper is another one: no API key of the backup will work; set its ATELIER_PEPPER")
    return BackupFacts(
        made_at=_made_at(manifest),
        keys=keys,
        jobs=manifest["jobs"],
        objects=len(objects),
        missing=[name for name in objects if name not in stored],
        problems=problems,
    )


def restore_secrets(settings: Settings, place: str) -> None:
    """Write the local secrets of a backup where there are none yet. Raises `BackupError`."""
    files = BackupFiles(place, settings.storage_options)
    text, local = files.secrets(files.manifest()), settings.data_dir / SECRETS
    if text is not None and not local.exists():
        write_atomically(local, text)


def restore(settings: Settings, redis_url: str, place: str) -> BackupFacts:
    """Write all keys into an empty Redis. Safe to repeat after an interruption.

    Raises `BackupError`, `StoreUnavailable`.
    """
    files = BackupFiles(place, settings.storage_options)
    manifest = files.manifest()
    with RedisCopy(redis_url).open() as server:
        server.begin(files.manifest_digest())
        for batch in files.keys(manifest):
            server.write(batch)
        keys = server.end()
    made_at = _made_at(manifest)
    return BackupFacts(made_at=made_at, keys=keys, jobs=manifest["jobs"], objects=manifest["objects"])


def _objects(key: CopiedKey) -> list[str]:
    """Return the objects of the storage that a job's or a LoRA's record names."""
    uris: list[str] = []
    if key.name.startswith(redis_key("job", "")) and key.fields.get("state") == "completed":
        try:
            whole = unpack(key.name.removeprefix(redis_key("job", "")), key.fields)
            uris = [image.image_uri for image in read_images(whole.get("images"))]
        except UnreadableRecord:
            uris = []
    if key.name.startswith(redis_key("lora", "")) and key.fields.get("source") == "registered":
        uris = [key.fields.get("file", "")]
    return [found[1] for uri in uris if (found := _OBJECT.fullmatch(uri))]


def _fingerprint(settings: Settings) -> str:
    """Return a fingerprint that tells one pepper from another, and reveals nothing more."""
    return hmac.digest(settings.pepper_bytes, b"fingerprint", "sha256").hex()[:16]


def _secrets_differ(settings: Settings, manifest: Mapping[str, Any], files: BackupFiles) -> bool:
    if not settings.has_pepper and not Path(settings.data_dir / SECRETS).exists():
        text = files.secrets(manifest)  # restored with the keys
        return text is None or "pepper" not in json.loads(text)
    return _fingerprint(settings) != manifest["pepper"]


def _made_at(manifest: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(manifest["made_at"]).astimezone(UTC)
