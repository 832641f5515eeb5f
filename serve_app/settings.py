"""Settings from the process environment: locations, limits and secrets.

Each value is checked here, so that a wrong one stops the process with the variable's name before anything starts.
"""

import difflib
import hmac
import json
import logging
import os
import re
import secrets
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from serve_app.atomic_files import write_atomically
from serve_app.domain.accounts import BUILTIN_PLANS, Plan
from serve_app.domain.requests import Variant

ROOT = Path(__file__).resolve().parent.parent
"""The checkout (or the installed tree) that holds `configs/` and `models/`."""

Network = IPv4Network | IPv6Network

PREFIX = "ATELIER_"
OTHERS_VARIABLES = (
    *("ATELIER_URL", "ATELIER_BASE_URL", "ATELIER_KEY"),  # read by whoever calls a service
    *("ATELIER_CONNECTIONS_PER_ADDRESS", "ATELIER_HAPROXY", "ATELIER_HTTP_HOST", "ATELIER_PROXY_SECRET"),  # the proxy's
    *("ATELIER_KUBERNETES_API", "ATELIER_KUBERNETES_IDENTITY"),  # read by the chart's job that makes an account
)
"""Variables with our prefix that other programs read."""
_SERVICE_LINK = re.compile(
    r"ATELIER_(\w+_)?(SERVICE_HOST=.+|SERVICE_PORT(_\w+)?=\d+|PORT=\w+://.+|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.+)"
)
"""What Kubernetes sets for each of its services whose name begins with `atelier`, unless a pod turns that off."""

SLOWEST_RATE = 200.0
"""One ingress replica answers at least this many requests a second: a third of what was measured on a small machine."""
LEAST_REDIS_WAIT = timedelta(seconds=3)
"""One call to Redis may take this long: nobody gives up before it is known whether the server answers at all."""


def _split(value: Any) -> Any:
    """Split a text by commas; return anything else as it is."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _check_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("must be like s3://bucket/folder/, with a bucket or host, and a / at its end")
    return prefix


_PREFIX = re.compile(r"(?:file:///|memory://|[a-z][a-z0-9]*://[^/:\s]+(?::\d+)?/)(?:[^/\s?#%]+/)*")
SourcePrefix = Annotated[str, AfterValidator(_check_prefix)]


Origin = Annotated[str, Field(pattern=r"^https?://[^/\s?#@*A-Z]+$")]
_STORAGE = re.compile(
    r"(?:file|local):///.*"
    r"|(?:s3a?|gc?s)://[^/\s]\S*"
    r"|(?!(?:file|local|s3a?|gc?s):)[a-z][a-z0-9+.-]*://\S*"  # fsspec knows more protocols, each with its own rules
)


def _check_storage(url: str) -> str:
    """Refuse what fsspec takes for a folder of the working directory, `s3//bucket` or `file://images`, and no bucket."""
    if url and not _STORAGE.fullmatch(url):
        raise ValueError("must be an address like s3://bucket/prefix or file:///srv/images")
    return url


def _check_web_address(url: str) -> str:
    try:
        address = urlsplit(url)
        is_whole = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:  # the port is no number, or a bracket is open
        is_whole = False
    if url and (not is_whole or re.search(r"[\s#]", url)):
        raise ValueError("must be an address like https://images.example.com")
    return url


def _check_public_url(url: str) -> str:
    if "?" in url:
        raise ValueError("must be an address without a query, since the address of each image adds its own")
    return url


def _check_secret(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value().encode()) < LEAST_SECRET_BYTES:
        raise ValueError(f"must have {LEAST_SECRET_BYTES} bytes or more")
    return secret


def _check_log_level(level: str) -> str:
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}")
    return level.upper()


def _check_path(path: Any) -> Any:
    if path == "":
        raise ValueError("must not be empty: that would be the working directory")
    return path


LEAST_SECRET_BYTES = 16
"""A secret of fewer bytes could be guessed by who holds one digest or signature made with it."""
Secret = Annotated[SecretStr, AfterValidator(_check_secret)]
SomePath = Annotated[Path, BeforeValidator(_check_path)]
WebAddress = Annotated[str, AfterValidator(_check_web_address)]
Life = Annotated[timedelta, Field(gt=timedelta(), le=timedelta(days=36_525))]
"""A duration that is neither zero nor so long that Redis or a date could not hold the end of it."""


class Settings(BaseSettings):
    """`ATELIER_*` environment variables. An unknown value stops the process with the variable's name."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True
    )

    data_dir: SomePath = Path("var")
    redis_url: str = Field(default="", validation_alias=AliasChoices("ATELIER_REDIS_URL", "REDIS_URL", "redis_url"))
    """The address of a Redis server; when it is empty, an embedded one is started under `data_dir`."""
    redis_may_lose_jobs: bool = False
    """Start with a Redis that evicts keys or keeps no append-only file, and so loses accepted jobs."""
    storage_url: Annotated[str, AfterValidator(_check_storage)] = ""
    """The fsspec URL under which images are stored; when it is empty, they are in `data_dir/images`."""
    storage_shared: bool = False
    """The storage is a local folder that every machine of a cluster has mounted."""
    network_encrypted: bool = False
    """Says that the network between a cluster's machines is private and encrypted, so that Ray's TLS is not
    demanded."""
    disk_reserve: ByteSize = ByteSize(512 << 20)
    """New jobs are refused while the disk of the embedded Redis or of local images has less free than this; 0 switches
    that off."""
    weight_cache: ByteSize = ByteSize(50 << 30)
    """Each machine keeps at most this much of adapters' files under `data_dir/weights`; what was used longest ago goes
    first."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    image_endpoint: Annotated[
        str, AfterValidator(lambda given: given if given == "service" else _check_web_address(given))
    ] = ""
    """The endpoint for which a bucket's image addresses are signed, where customers reach it by another than
    the service does. With `service`, images of a bucket that they do not reach come through the service."""
    public_url: Annotated[WebAddress, AfterValidator(_check_public_url)] = ""
    """Image URLs begin with this address; empty takes the one that the caller used."""
    cors_origins: Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)] = ()
    """Pages of these origins, by commas, may call the API with a key from a browser: `https://app.example.com`."""
    mcp_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Names, by commas, under which assistants and web pages may call `/mcp`, besides that of `public_url`."""
    openai_models: dict[str, str] = Field(default_factory=dict[str, str])
    """The base model, or LoRA, that `/openai/v1` takes for a model that clients have built in, as `gpt-image-1`."""
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_split)] = ()
    """The `X-Forwarded-For` of these addresses or networks, by commas, is believed. HAProxy, where Serve starts it,
    reads the same variable."""
    max_keys_per_account: int = Field(default=100, ge=1)
    """How many API keys of one account may work at the same time."""
    max_lora_size: ByteSize = Field(default=ByteSize(1 << 30), ge=1, le=2 << 30)
    """An uploaded LoRA has at most this size."""
    max_image_bytes_per_account: ByteSize = ByteSize(5 << 30)
    """The images that one account uploads take at most this many bytes of storage together."""
    lora_samples: bool = True
    """Draw a picture with each LoRA that an account adds, while nothing else is to do."""
    lora_sources: Annotated[tuple[SourcePrefix, ...], NoDecode, BeforeValidator(_split)] = ()
    """Customers may name a LoRA to fetch below these addresses, by commas: `s3://bucket/loras/`, `hf://acme/`."""
    catalog: SomePath = ROOT / "configs" / "catalog.yaml"
    plans: SomePath | None = None
    """This file is a YAML list of {interface, name, limit, window_s, loras, lora_bytes}, merged over the six built-in
    plans."""
    operator_token: SecretStr | None = Field(default=None, min_length=16)
    """It opens `/metrics` and the details of `/readyz`. Unset, it is made once as `data_dir/operator-token` (0600)."""
    pepper: Secret | None = None
    """This secret, version 1, keys the digests of API keys. Unset, it is made in `data_dir/secrets.json` (0600)."""
    peppers: dict[Annotated[int, Field(ge=1)], Secret] = Field(default_factory=dict)
    """These are versions of the pepper, in place of `pepper`: new API keys are made under the first, all verify."""
    signing_keys: dict[str, Secret] = Field(default_factory=dict)
    """Image URLs are signed with the first of these, key id → secret; all verify. Unset, one is made likewise."""
    image_url_life: Life = timedelta(hours=24)
    png_job_id: bool = False
    """Write the job's id into each image. Without it, and without marks, the same request gives the same file."""
    mark_images: bool = False
    """Mark every image as made by a model: by XMP, a signed C2PA manifest and a watermark."""
    marking_certificate: SomePath | None = None
    """The certificate (PEM, its chain after it) that signs manifests; unset, `data_dir/marking/certificate.pem`."""
    marking_key: SomePath | None = None
    """Its private key (PEM); unset, `data_dir/marking/key.pem`."""
    watermark_secret: Secret | None = None
    """This secret chooses the pattern of the watermark. Unset, the pepper's lowest version does."""
    retention: Life = timedelta(days=30)
    """How long records and images stay readable after a job ends."""
    idempotency_life: Life = timedelta(hours=24)
    max_queued: int = Field(default=100_000, ge=1)
    max_queued_per_account: int = Field(default=1_000, ge=1)
    account_share: float = Field(default=0.25, gt=0, le=1)
    """The stored jobs of one account on one interface may take this share of Redis's `maxmemory`, and never less than
    what its plan admits."""
    queue_age_limit: Life = timedelta(hours=24)
    max_attempts: int = Field(default=5, ge=1)
    lease: Life = timedelta(seconds=30)
    open_requests: int = Field(default=1_000, ge=1)
    """How many requests are in progress at one ingress replica, waiting polls aside; what exceeds both waits in front
    of it."""
    waiting_polls: int = Field(default=4_000, ge=0)
    """How many polls with `Prefer: wait=N` one ingress replica holds at a time, a quarter of them for one account."""
    redis_connections: int = Field(default=64, ge=1)
    """How many connections to Redis one process has. More add nothing: one fsync confirms all writes of one turn of the
    server's loop, and with many calls under way each waits longer for its answer than Redis takes."""
    redis_wait: Life | None = None
    """A call waits this long for a connection; then it is 503 `overloaded`. Unset, it is what `open_requests` take at
    200 a second."""
    webhook_proxy: WebAddress = ""
    """Webhooks to names that lead to no `webhook_networks` go through this HTTP proxy, which resolves them."""
    webhook_networks: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_split)] = ()
    """Webhooks may go to these addresses or networks, by commas, although they are private, by HTTP too."""
    accept_replicas: int = Field(default=0, ge=0)
    """How many Redis replicas must hold a job before it is acknowledged (`WAIT`); for failover, name them all."""
    polls_per_second: int = Field(default=50, ge=1)
    """How many polls a second one key may make at one ingress replica; polling every 5 seconds never meets it."""
    previews: bool = True
    """Show images in the console before they are finished, while somebody watches and no moderation is set."""
    moderation_url: WebAddress = ""
    """This address is asked by POST about each prompt and image; empty asks nobody (`serve_app/jobs/moderation.py`)."""
    moderation_callable: str = ""
    """A function `package.module:function` is asked in place of an address."""
    moderation_timeout: Life = timedelta(seconds=5)
    moderation_fails: Literal["closed", "open"] = "closed"
    """While moderation is silent, `closed` refuses requests with 503 and stores no image, and `open` allows all."""
    audit_life: Life = timedelta(days=365)
    """How long a row of the audit log stays; an account's log holds its newest 10,000."""
    log_level: Annotated[str, AfterValidator(_check_log_level)] = "INFO"
    log_format: Literal["text", "json"] = "text"
    trace_endpoint: WebAddress = Field(
        default="",
        validation_alias=AliasChoices(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "trace_endpoint"
        ),
    )
    """Traces are sent when it is set. This variable and all others of OpenTelemetry are read by its own library."""
    otel_service_name: str = Field(
        default="atelier", validation_alias=AliasChoices("OTEL_SERVICE_NAME", "otel_service_name")
    )
    otel_disabled: bool = Field(default=False, validation_alias=AliasChoices("OTEL_SDK_DISABLED", "otel_disabled"))

    @model_validator(mode="after")
    def _know_every_name(self) -> Self:
        known = {*OTHERS_VARIABLES, *(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)}
        given = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
        for name in sorted(given.keys() - known):
            if not _SERVICE_LINK.fullmatch(f"{name}={given[name]}"):
                near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
                raise ValueError(f"{name}: there is no such setting; the nearest is {near[0]}")
        if self.image_endpoint.startswith("http") and not self.storage_url.startswith("s3:"):
            raise ValueError("ATELIER_IMAGE_ENDPOINT: an address is for a storage of s3://")
        return self

    @cached_property
    def storage(self) -> str:
        return self.storage_url or (self.data_dir / "images").resolve().as_uri()

    @property
    def requests_at_once(self) -> int:
        """Return how many requests one ingress replica takes, waiting polls included."""
        return self.open_requests + self.waiting_polls

    def with_requests_at_once(self, most: int) -> "Settings":
        """Return the settings for a replica that takes `most` requests, at most half of them waiting polls."""
        waiting = min(self.waiting_polls, most // 2)
        return self.model_copy(update={"open_requests": most - waiting, "waiting_polls": waiting})

    @property
    def longest_redis_wait(self) -> timedelta:
        return self.redis_wait or max(LEAST_REDIS_WAIT, timedelta(seconds=self.open_requests / SLOWEST_RATE))

    @property
    def longest_record_life(self) -> timedelta:
        """Return how long a job's record can live, from its accept on."""
        return self.retention + 2 * self.queue_age_limit

    @cached_property
    def plan_table(self) -> dict[tuple[Variant, str], Plan]:
        """Return every plan by (variant, name); the first of a variant is its lowest."""
        plans = list(BUILTIN_PLANS)
        if self.plans is not None:
            rows = TypeAdapter(list[PlanRow]).validate_python(yaml.safe_load(self.plans.read_text()))
            plans += [row.plan for row in rows]
        return {(plan.variant, plan.name): plan for plan in plans}

    def plans_of(self, variant: Variant) -> list[Plan]:
        """Return the plans of one interface, the lowest first."""
        return [plan for plan in self.plan_table.values() if plan.variant == variant]

    def plan_named(self, variant: Variant, name: str | None) -> Plan:
        """Return the interface's plan of this name; the lowest where there is none (any more)."""
        return self.plan_table.get((variant, name or ""), self.plans_of(variant)[0])

    @cached_property
    def key_peppers(self) -> dict[int, bytes]:
        """Return version → secret for the digests of API keys; the first makes new keys."""
        if self.peppers:
            return {version: secret.get_secret_value().encode() for version, secret in self.peppers.items()}
        pepper = self.pepper.get_secret_value() if self.pepper else self._local_secrets["pepper"]
        return {1: pepper.encode()}

    @property
    def pepper_bytes(self) -> bytes:
        """Return the lowest version of the pepper, which names folders of images and audit logs.

        Those names stay as they are as long as it is listed.
        """
        return self.key_peppers[min(self.key_peppers)]

    @property
    def has_pepper(self) -> bool:
        return self.pepper is not None or bool(self.peppers)

    @property
    def marking_files(self) -> tuple[Path, Path]:
        """Return where the certificate is that signs manifests, and its key."""
        folder = self.data_dir / "marking"
        return self.marking_certificate or folder / "certificate.pem", self.marking_key or folder / "key.pem"

    @property
    def has_watermark_key(self) -> bool:
        """Return whether there is a key without making one."""
        return self.watermark_secret is not None or self.has_pepper or (self.data_dir / "secrets.json").exists()

    @property
    def watermark_key(self) -> bytes:
        """Return the key of the watermark."""
        secret = self.watermark_secret.get_secret_value().encode() if self.watermark_secret else self.pepper_bytes
        return hmac.digest(secret, b"watermark", "sha256")

    @cached_property
    def url_keys(self) -> dict[str, bytes]:
        """Return kid → key for signing image URLs; the first entry signs."""
        if self.signing_keys:
            return {kid: secret.get_secret_value().encode() for kid, secret in self.signing_keys.items()}
        return {"local": self._local_secrets["signing_key"].encode()}

    @property
    def operator_secret(self) -> bytes:
        """Return the operator's token; one that is not set is made at first use, for this machine alone."""
        if self.operator_token is not None:
            return self.operator_token.get_secret_value().encode()
        return self._made_once("operator-token", secrets.token_urlsafe(32)).strip().encode()

    @cached_property
    def _local_secrets(self) -> dict[str, str]:
        new = {"pepper": secrets.token_urlsafe(32), "signing_key": secrets.token_urlsafe(32)}
        return json.loads(self._made_once("secrets.json", json.dumps(new)))

    def _made_once(self, name: str, new: str) -> str:
        """Return what a 0600 file of the data directory holds, which is made at first use."""
        path = self.data_dir / name
        if not path.exists():
            with suppress(FileExistsError):  # the first of several starters wins; the others read its file
                write_atomically(path, new, overwrite=False)
        return path.read_text()


class PlanRow(BaseModel):
    """A plan of the file that `plans` names."""

    model_config = ConfigDict(extra="forbid")

    interface: Variant
    name: str = Field(min_length=1)
    limit: int = Field(ge=1)
    window_s: float = Field(gt=0, le=timedelta(days=36_525).total_seconds())
    loras: int | None = Field(default=None, ge=0)
    lora_bytes: int | None = Field(default=None, ge=0)

    @property
    def plan(self) -> Plan:
        given = self.model_dump(exclude={"interface", "window_s"}, exclude_none=True)
        return Plan(variant=self.interface, window=timedelta(seconds=self.window_s), **given)
