"""Calls of `/v1/loras`, without I/O: what the sync and the async client share."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from serve_app.client.protocol import Call, Operation, Service
from serve_app.client.records import Lora
from serve_app.client.upload import OnSent, Upload, lora_files

PAGE = 200


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
            query = urlencode({**asked, "limit": PAGE, **cursor})
            page = yield from self._json("GET", f"?{query}")
            found += [Lora.read(row) for row in page["loras"]]
            if "next_cursor" not in page:
                return found
            cursor = {"cursor": page["next_cursor"]}

    def get(self, lora_id: str) -> Operation[Lora]:
        return Lora.read((yield from self._json("GET", f"/{quote(lora_id, safe='')}")))

    def add(
        self, path: Path, fields: dict[str, str], on_progress: OnSent | None, idempotency_key: str | None
    ) -> Operation[Lora]:
        """A POST that is safe to retry: with the idempotency key, a second arrival returns the first one's LoRA."""
        headers = {**self._credential, "Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        upload = Upload(fields, lora_files(path), on_progress)
        response = yield from self.service.send(Call("POST", self._address, headers, upload=upload))
        return Lora.read(response.json())

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


def form_fields(
    path: Path, name: str | None, base_model: str, description: str, trigger_words: Sequence[str]
) -> dict[str, str]:
    """The text fields of an upload; a LoRA without a name is called as its file."""
    texts = {"description": description, "trigger_words": ", ".join(trigger_words)}
    given = {field: text for field, text in texts.items() if text}
    return {"name": name or path.stem, "base_model": base_model, **given}


def changed_fields(
    name: str | None, description: str | None, trigger_words: Sequence[str] | None
) -> dict[str, str | list[str]]:
    """What was given."""
    words = None if trigger_words is None else list(trigger_words)
    given = {"name": name, "description": description, "trigger_words": words}
    return {field: value for field, value in given.items() if value is not None}
