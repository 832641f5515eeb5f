"""Receivers of webhooks on the loopback: one that answers as a test says, and one that checks each end of a job."""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from standardwebhooks.webhooks import Webhook, WebhookVerificationError


@dataclass
class Receiver:
    """An HTTP server that answers each POST by `answer`, and keeps what it was sent."""

    tls: ssl.SSLContext | None = None
    answer: bytes = b"HTTP/1.1 204 No Content\r\n\r\n"
    is_silent: bool = False
    port: int = 0
    got: list[tuple[str, dict[str, str], str]] = field(default_factory=lambda: list[tuple[str, dict[str, str], str]]())

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{path}"

    def of(self, path: str) -> list[tuple[dict[str, str], str]]:
        return [(headers, body) for at, headers, body in self.got if at == path]

    def answer_to(self, headers: Mapping[str, str], body: str) -> bytes:
        return self.answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = (await reader.readexactly(int(headers["content-length"]))).decode()
            self.got.append((head[0].split()[1], headers, body))
            if self.is_silent:
                await reader.read()  # until the sender gives up
            else:
                writer.write(self.answer_to(headers, body))
                await writer.drain()
        writer.close()


@dataclass
class CheckingReceiver(Receiver):
    """Verifies every message by the library of Standard Webhooks, and takes none before it has come twice."""

    secret: str = ""
    attempts: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """How often each `webhook-id` came, by the job whose end it told."""
    forged: list[str] = field(default_factory=list[str])

    def answer_to(self, headers: Mapping[str, str], body: str) -> bytes:
        try:
            job_id = Webhook(self.secret).verify(body, dict(headers))["data"]["id"]
        except WebhookVerificationError as error:
            self.forged.append(f"{headers.get('webhook-id')}: {error}")
            return self.answer
        attempts = self.attempts.setdefault(job_id, Counter())
        attempts[headers["webhook-id"]] += 1
        return self.answer if attempts[headers["webhook-id"]] > 1 else b"HTTP/1.1 503 Later\r\n\r\n"

    def untold(self, job_ids: Iterable[str]) -> list[str]:
        """Return the jobs whose end was not taken yet."""
        return [job_id for job_id in job_ids if max(self.attempts.get(job_id, Counter()).values(), default=0) < 2]

    def problems(self, job_ids: Iterable[str]) -> Iterator[str]:
        """Tell what is wrong, if each of these jobs has ended once."""
        yield from (f"a webhook was not signed as it should be: {each}" for each in self.forged)
        for job_id in self.untold(job_ids):
            yield f"{job_id}: its end was told to nobody ({self.attempts.get(job_id)})"
        for job_id, attempts in self.attempts.items():
            if len(attempts) > 1:
                yield f"{job_id}: its end was told as several: {dict(attempts)}"


R = TypeVar("R", bound=Receiver)


@asynccontextmanager
async def listening(receiver: R) -> AsyncGenerator[R]:
    """Let the receiver listen on a free port until the block ends."""
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=receiver.tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()


@asynccontextmanager
async def receiving(**more: Any) -> AsyncGenerator[Receiver]:
    async with listening(Receiver(**more)) as receiver:
        yield receiver
