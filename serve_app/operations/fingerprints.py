"""Compares what every machine of a cluster must have alike, by digests, and names those that differ."""

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Mapping

from serve_app.domain.errors import StoreUnavailable
from serve_app.operations.checks import Check, fail, ok
from serve_app.settings import ROOT, Settings
from serve_app.store.embedded_redis import running_redis
from serve_app.store.redis_inspection import inspect_redis

DIGEST_LENGTH = 12
CODE_FOLDERS, CODE_FILES = ("serve_app", "deployments"), ("*.py", "*.lua", "*.cfg", "*.html", "haproxy", "*.awk")

ADVICE = {
    "redis": "give every machine the same ATELIER_REDIS_URL, and let it be reached from there",
    "pepper": "give every machine the same ATELIER_PEPPER or ATELIER_PEPPERS, in the same order",
    "signing keys": "give every machine that has an ingress the same ATELIER_SIGNING_KEYS, in the same order",
    "storage": "give every machine the same ATELIER_STORAGE_URL and ATELIER_STORAGE_OPTIONS",
    "catalog": "put the same file at ATELIER_CATALOG on every machine",
    "marking": "give every machine the same ATELIER_MARK_IMAGES and ATELIER_WATERMARK_SECRET",
    "certificate": "give every machine that has workers the same certificate and key for marking",
    "code": "install the same version on every machine",
}


def fingerprints(settings: Settings, nonce: bytes) -> dict[str, str]:
    """Return a digest of each thing that must be alike: keyed by `nonce`, it reveals nothing of a secret."""
    sources: dict[str, Callable[[], str]] = {
        "redis": lambda: _redis(settings),
        "pepper": lambda: _pepper(settings),
        "signing keys": lambda: _signing_keys(settings),
        "storage": lambda: json.dumps([settings.storage, settings.storage_options], sort_keys=True),
        "catalog": lambda: settings.catalog.read_text(encoding="utf-8"),
        "marking": lambda: _marking(settings),
        "certificate": lambda: settings.marking_files[0].read_text() if settings.mark_images else "off",
        "code": _code,
    }
    return {name: _digest(source, nonce) for name, source in sources.items()}


def differences(found: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Compare the digests of all machines; each check names those that differ from most."""
    names = list(dict.fromkeys(name for digests in found.values() for name in digests))
    return [
        _compared(name, {machine: digests[name] for machine, digests in found.items() if name in digests})
        for name in names
    ]


def _compared(name: str, digests: Mapping[str, str]) -> Check:
    (usual, number), *others = Counter(digests.values()).most_common()
    broken = {machine: text for machine, text in digests.items() if text.startswith("!")}
    if broken:
        reasons = "; ".join(f"{machine}: {text[1:]}" for machine, text in broken.items())
        return fail(f"cluster {name}", reasons, ADVICE[name])
    if not others:
        return ok(f"cluster {name}", f"the same on {number} node{'' if number == 1 else 's'}")
    odd = sorted(machine for machine, digest in digests.items() if digest != usual)
    return fail(f"cluster {name}", f"{', '.join(odd)}: another than on {number} of {len(digests)} nodes", ADVICE[name])


def _digest(source: Callable[[], str], nonce: bytes) -> str:
    """Return the digest, or `!` and the reason why its source cannot be read."""
    try:
        return hmac.new(nonce, source().encode(), hashlib.sha256).hexdigest()[:DIGEST_LENGTH]
    except (OSError, ValueError, StoreUnavailable) as error:
        return f"!{error}"


def _redis(settings: Settings) -> str:
    """Identify Redis by the server that answers: an address may be another one on each machine."""
    if settings.redis_url:
        return inspect_redis(settings.redis_url).identity
    running = running_redis(settings.data_dir)
    return (
        inspect_redis(running.url).identity if running else f"embedded, not running, in {settings.data_dir.resolve()}"
    )


def _pepper(settings: Settings) -> str:
    if not settings.has_pepper:
        return _secrets_file(settings, "ATELIER_PEPPER")
    return _in_order({str(version): secret for version, secret in settings.key_peppers.items()})


def _signing_keys(settings: Settings) -> str:
    return _in_order(settings.url_keys) if settings.signing_keys else _secrets_file(settings, "ATELIER_SIGNING_KEYS")


def _marking(settings: Settings) -> str:
    secret = settings.watermark_secret.get_secret_value() if settings.watermark_secret else ""
    return f"{settings.mark_images} {secret}"


def _secrets_file(settings: Settings, variable: str) -> str:
    """Read the file of local secrets, which replaces the variables; a check never creates it."""
    try:
        return (settings.data_dir / "secrets.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{variable} is not set") from None


def _in_order(secrets: Mapping[str, bytes]) -> str:
    """List secrets in their order: the first makes new digests and signatures."""
    return json.dumps([[name, secret.decode()] for name, secret in secrets.items()])


def _code() -> str:
    """List every file that runs here, by its path and content."""
    files = sorted(file for folder in CODE_FOLDERS for kind in CODE_FILES for file in (ROOT / folder).rglob(kind))
    digests = {file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return json.dumps(digests)
