"""Asks the operator's moderation about prompts before acceptance, and images before storage."""

import asyncio
import base64
import inspect
import json
import logging
import pkgutil
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import httpx

from serve_app.domain.errors import AtelierError, StoreUnavailable
from serve_app.settings import Settings

_log = logging.getLogger(__name__)

MAX_ANSWER_BYTES, MAX_REASON = 64 * 1024, 200


class Verdict(NamedTuple):
    """The moderation's answer; `reason` is for the caller."""

    allowed: bool
    reason: str = ""


class ModerationUnavailable(StoreUnavailable):
    """The moderation gave no answer in time, or none that can be read."""


class BadModeration(AtelierError):
    """The moderation that the settings name cannot be used."""


class Moderation:
    """Asks the service or the function of the settings; without either, everything is allowed."""

    def __init__(self, settings: Settings) -> None:
        """Raise `BadModeration` where the settings name no usable service or function."""
        self._timeout_s = settings.moderation_timeout.total_seconds()
        self._is_open = settings.moderation_fails == "open"
        self._ask = _asker(settings)

    @property
    def is_on(self) -> bool:
        return self._ask is not None

    async def prompt(self, *, account_id: str, job_id: str, prompt: str, negative_prompt: str) -> Verdict:
        """Ask about a job's prompts. Raises `ModerationUnavailable`, if it fails closed."""
        texts = {"prompt": prompt, "negative_prompt": negative_prompt}
        return await self._verdict({"stage": "prompt", "account": account_id, "job": job_id, **texts})

    async def image(self, *, account_id: str, job_id: str, content: bytes) -> Verdict:
        """Ask about a job's image. Raises `ModerationUnavailable`, if it fails closed."""
        if self._ask is None:
            return Verdict(True)
        image = base64.b64encode(content).decode()
        return await self._verdict({"stage": "image", "account": account_id, "job": job_id, "image": image})

    async def _verdict(self, question: dict[str, str]) -> Verdict:
        if self._ask is None:
            return Verdict(True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return _read(await self._ask(question))
        except Exception as error:  # noqa: BLE001 - the operator's code and network fail in any way they like
            # The error is named by its type alone: its text may repeat the prompt.
            _log.warning("moderation of job %s failed: %s", question["job"], type(error).__name__)
            if self._is_open:
                return Verdict(True)
        raise ModerationUnavailable("the moderation gave no answer")


Ask = Callable[[dict[str, str]], Awaitable[object]]


def _asker(settings: Settings) -> Ask | None:
    if settings.moderation_url and settings.moderation_callable:
        raise BadModeration("ATELIER_MODERATION_URL and ATELIER_MODERATION_CALLABLE: set one of them")
    if settings.moderation_url:
        return _http(settings.moderation_url)
    return _function(settings.moderation_callable) if settings.moderation_callable else None


def _http(url: str) -> Ask:
    async def ask(question: dict[str, str]) -> object:
        async with (
            httpx.AsyncClient(timeout=None) as client,  # by HTTPS_PROXY, and not for NO_PROXY
            client.stream("POST", url, json=question) as answer,
        ):
            if answer.status_code != 200:
                raise ValueError(answer.status_code)
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise ValueError("too long")
            return json.loads(body)

    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs the address, which may hold a secret
    return ask


def _function(name: str) -> Ask:
    """Load `package.module:function`, plain or async; a plain one runs in a thread."""
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadModeration(f"ATELIER_MODERATION_CALLABLE: {name}: {error}") from error
    if not callable(function):
        raise BadModeration(f"ATELIER_MODERATION_CALLABLE: {name} cannot be called")
    if inspect.iscoroutinefunction(function):
        return cast(Ask, function)
    return lambda question: asyncio.to_thread(function, question)


def _read(answer: object) -> Verdict:
    """Read a verdict. Raises `TypeError` for what is not `{"allowed": bool, "reason": str}`."""
    row = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    allowed, reason = row.get("allowed"), row.get("reason", "")
    if not isinstance(allowed, bool) or not isinstance(reason, str):
        raise TypeError("not a verdict")
    return Verdict(allowed, " ".join(reason.split())[:MAX_REASON])
