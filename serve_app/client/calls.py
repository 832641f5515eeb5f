"""The operations of `/v1/jobs` and `/v1/usage`, which both interfaces share.

Calls of `/v1/loras`, without I/O: what the sync and the async client share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote, urlencode

from serve_app.client.errors import ServiceError
from serve_app.client.protocol import Call, Operation, Service, checked_key
from serve_app.client.records import Lora, Record, Usage
from serve_app.client.upload import CHECK_S, OnSent, Upload, lora_files, weights_sha256

PAGE = 100


def list_jobs(service: Service, limit: int) -> Operation[list[Record]]:
    """The newest jobs of the account, newest first, over as many pages as it takes."""
    found: list[Record] = []
    cursor: dict[str, str] = {}
    while len(found) < limit:
        query = urlencode({"limit": min(PAGE, limit - len(found)), **cursor})
        page = yield from _json(service, "GET", f"/v1/jobs?{query}")
        found += [Record.read_job(row) for row in page["jobs"]]
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}
    return found


def cancel_job(service: Service, job_id: str) -> Operation[Record]:
    row = yield from _json(service, "POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel")
    return Record.read_job(row)


def delete_image(service: Service, job_id: str, image_id: str) -> Operation[None]:
    return service.delete_at(f"/v1/jobs/{quote(job_id, safe='')}/images/{quote(image_id, safe='')}")


def usage(service: Service, days: int) -> Operation[list[Usage]]:
    body = yield from _json(service, "GET", f"/v1/usage?{urlencode({'days': days})}")
    return [Usage.read(row) for row in body["usage"]]


def _json(service: Service, method: str, path: str) -> Operation[Any]:
    response = yield from service.send(Call(method, service.base_url + path, service.credential(service.interface)))
    return response.json()


LORA_PAGE = 200
ASK_FROM_BYTES = 8 << 20
"""Smaller files are sent at once: asking first is a request of its own, and counts as one."""
_SEND_THE_FILE = (404, 405, 415)
"""Answers to the question whether weights are known: they are not, or the service is older than the question."""


@dataclass(frozen=True, slots=True)
class LoraService:
    """The operations on LoRAs with the key of a `Service`."""

    service: Service

    def list(self, base_model: str | None, q: str | None) -> Operation[list[Lora]]:
        """All pages."""
        asked = {name: value for name, value in {"base_model": base_model, "q": q}.items() if value is not None}
        found: list[Lora] = []
        cursor: dict[str, str] = {}
        while True:
            query = urlencode({**asked, "limit": LORA_PAGE, **cursor})
            page = yield from self._json("GET", f"?{query}")
            found += [Lora.read(row) for row in page["loras"]]
            if "next_cursor" not in page:
                return found
            cursor = {"cursor": page["next_cursor"]}

    def get(self, lora_id: str) -> Operation[Lora]:
        return Lora.read((yield from self._json("GET", f"/{quote(lora_id, safe='')}")))

    def add_from(
        self, path: str | Path | None, source: str | None, fields: dict[str, Any], on_progress: OnSent | None,
        idempotency_key: str | None,
    ) -> Operation[Lora]:  # fmt: skip
        """Add a LoRA from a path, or from a source that the service fetches.

        Raises `ValueError` for neither and for both.
        """
        if source is not None and path is None:
            return self.add_source(source, fields, idempotency_key)
        if path is None or source is not None:
            raise ValueError("path: give either a path or a source")
        return self.add(Path(path), fields, on_progress, idempotency_key)

    def add(
        self, path: Path, fields: dict[str, Any], on_progress: OnSent | None, idempotency_key: str | None
    ) -> Operation[Lora]:
        """Add a LoRA by a POST that is safe to retry: the idempotency key returns the first one's LoRA.

        Large files are sent only if the account has no LoRA of these weights.
        """
        headers = {**self._credential, "Idempotency-Key": checked_key(idempotency_key)}
        files = lora_files(path)
        if sum(file.stat().st_size for file in files.values()) >= ASK_FROM_BYTES:
            try:
                return (yield from self._add_json({**fields, "sha256": weights_sha256(files)}, headers))
            except ServiceError as error:
                if error.status not in _SEND_THE_FILE:
                    raise
        form = {name: ", ".join(text) if name == "trigger_words" else text for name, text in fields.items()}
        call = Call("POST", self._address, headers, upload=Upload(form, files, on_progress), timeout=CHECK_S)
        return Lora.read((yield from self.service.send(call)).json())

    def add_source(self, source: str, fields: dict[str, Any], idempotency_key: str | None) -> Operation[Lora]:
        """The service fetches the file."""
        headers = {**self._credential, "Idempotency-Key": checked_key(idempotency_key)}
        return self._add_json({**fields, "source": source}, headers)

    def _add_json(self, body: dict[str, Any], headers: dict[str, str]) -> Operation[Lora]:
        call = Call("POST", self._address, headers, body, timeout=CHECK_S)
        return Lora.read((yield from self.service.send(call)).json())

    def update(self, lora_id: str, changes: dict[str, Any]) -> Operation[Lora]:
        return Lora.read((yield from self._json("PATCH", f"/{quote(lora_id, safe='')}", changes)))

    def delete(self, lora_id: str) -> Operation[None]:
        return self.service.delete_at(f"/v1/loras/{quote(lora_id, safe='')}")

    def share(self, lora_id: str, account: str) -> Operation[Lora]:
        path = f"/{quote(lora_id, safe='')}/grants"
        return Lora.read((yield from self._json("POST", path, {"account": account})))

    def unshare(self, lora_id: str, account: str) -> Operation[None]:
        return self.service.delete_at(f"/v1/loras/{quote(lora_id, safe='')}/grants/{quote(account, safe='')}")

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Operation[Any]:
        response = yield from self.service.send(Call(method, self._address + path, self._credential, body))
        return response.json()

    @property
    def _address(self) -> str:
        return self.service.base_url + "/v1/loras"

    @property
    def _credential(self) -> dict[str, str]:
        return self.service.credential(self.service.interface)


def base_of(base: str | None, base_model: str | None) -> str:
    """The base model, given by one of its two names. Raises `ValueError` for neither and for both."""
    if base is None and base_model is not None:
        return base_model
    if base is None or base_model is not None:
        raise ValueError("base: name the base model once, as base or as base_model")
    return base


def described(
    name: str | None, path: str | Path, base_model: str, description: str, trigger_words: Sequence[str]
) -> dict[str, Any]:
    """What is said of a new LoRA; without a name it is called as its file or folder."""
    texts = {"description": description, "trigger_words": list(trigger_words)}
    given = {field: text for field, text in texts.items() if text}
    return {"name": name or PurePath(path).stem, "base_model": base_model, **given}


def changed_fields(
    name: str | None, description: str | None, trigger_words: Sequence[str] | None
) -> dict[str, str | list[str]]:
    """What was given."""
    words = None if trigger_words is None else list(trigger_words)
    given = {"name": name, "description": description, "trigger_words": words}
    return {field: value for field, value in given.items() if value is not None}
