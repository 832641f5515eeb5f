"""The calls on `client.loras`: list, find, add, change, share and delete LoRAs.

The type variables are what the methods return: a LoRA for `Client`, a coroutine that returns one for `AsyncClient`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from serve_app.client.errors import NotFound, UnknownLora
from serve_app.client.protocol import Operation, Service, checked_key, path_of, then, without_none
from serve_app.client.records import Lora
from serve_app.client.upload import CHECK_S, OnSent, Upload, lora_files, upload_progress, weights_sha256

PAGE = 200
"""One call asks for at most this many rows of a listing."""
ASK_FROM_BYTES = 8 << 20
"""Smaller files are sent at once: asking first is a request of its own, and counts as one."""

T = TypeVar("T")
LoraT = TypeVar("LoraT")
LorasT = TypeVar("LorasT")
NoneT = TypeVar("NoneT")


class LoraCalls(Generic[LoraT, LorasT, NoneT]):
    """The LoRAs that this account may use, and its own, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._service, self._execute = service, execute

    def list(self, *, base_model: str | None = None, q: str | None = None) -> LorasT:
        """List the LoRAs, newest first; those of one base model, or with words of `q` in name, description or id."""
        asked = without_none({"base_model": base_model, "q": q})
        return self._execute(rows_of(self._service, "/v1/loras", "loras", Lora.read, asked))

    def find(self, name_or_id: str) -> LoraT:
        """Return the one LoRA of this name, in any case, or id. Raises `UnknownLora`, which lists the names."""
        return self._execute(find_lora(self._service, name_or_id))

    def get(self, lora_id: str) -> LoraT:
        """Return a LoRA that this account owns or may use. Raises `NotFound`."""
        return self._ask("GET", lora_id)

    def add(
        self,
        path: str | Path | None = None,
        *,
        source: str | None = None,
        base: str,
        name: str | None = None,
        description: str = "",
        trigger_words: Sequence[str] = (),
        progress: bool = False,
        on_progress: OnSent | None = None,
        idempotency_key: str | None = None,
    ) -> LoraT:
        """Upload a safetensors file, or a folder as PEFT saves one, for the base model `base`.

        It can be used at once. With `source` in place of a path the service fetches it, from where its operator
        allows: `s3://…`, `hf://…`. `progress` shows a bar of the upload; `on_progress` is called with the bytes sent
        and the bytes in all. Weights that the account has already give the LoRA that has them, and are not sent again
        from 8 MiB on. Raises `InvalidRequest` with the reason for a file that does not fit, `Conflict` over the plan's
        quota, `ValueError` for arguments that exclude each other.
        """
        if (path is None) == (source is None):
            raise ValueError("path: give either a path or a source")
        fields: dict[str, Any] = {
            "name": name or PurePath(path or source or "").stem,
            "base_model": base,
            **({"description": description} if description else {}),
            **({"trigger_words": [*trigger_words]} if trigger_words else {}),
        }
        headers = {"Idempotency-Key": checked_key(idempotency_key)}
        showing = upload_progress(fields["name"], on_progress, shows_bar=progress)
        adding = _add(self._service, path, fields if source is None else {**fields, "source": source}, headers, showing)
        return self._execute(then(adding, Lora.read))

    def update(
        self,
        lora_id: str,
        *,
        name: str | None = None,
        description: str | None = None,
        trigger_words: Sequence[str] | None = None,
    ) -> LoraT:
        """Change the given fields of a LoRA of your own. Raises `NotFound`."""
        words = None if trigger_words is None else [*trigger_words]
        given = {"name": name, "description": description, "trigger_words": words}
        return self._ask("PATCH", lora_id, body=without_none(given))

    def delete(self, lora_id: str) -> NoneT:
        """Delete a LoRA of your own: jobs that wait for it or run with it end as failed. Raises `NotFound`."""
        return self._execute(self._service.delete(path_of("/v1/loras", lora_id)))

    def share(self, lora_id: str, account: str) -> LoraT:
        """Let another account, by its id or name, use a LoRA of your own. Raises `NotFound`."""
        return self._ask("POST", lora_id, "grants", body={"account": account})

    def unshare(self, lora_id: str, account: str) -> NoneT:
        """End what `share` began. Raises `NotFound`."""
        return self._execute(self._service.delete(path_of("/v1/loras", lora_id, "grants", account)))

    def _ask(self, method: str, *place: str, body: dict[str, Any] | None = None) -> LoraT:
        return self._execute(then(self._service.ask(method, path_of("/v1/loras", *place), body), Lora.read))


def rows_of(
    service: Service,
    path: str,
    name: str,
    read: Callable[[Any], T],
    asked: Mapping[str, Any] = {},
    limit: int | None = None,
) -> Operation[list[T]]:
    """What `read` makes of the rows of a listing, at most `limit`, over as many pages as it takes."""
    found: list[T] = []
    cursor: dict[str, str] = {}
    while limit is None or len(found) < limit:
        size = PAGE if limit is None else min(PAGE, limit - len(found))
        page = yield from service.ask("GET", f"{path}?{urlencode({**asked, 'limit': size, **cursor})}")
        found += map(read, page[name])
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}
    return found


def find_lora(service: Service, name_or_id: str) -> Operation[Lora]:
    """The LoRA of this name or id; the service looks for names in one request, and for ids here among all."""
    loras: list[Lora] = []
    for asked in ({"q": name_or_id}, {}):
        loras = yield from rows_of(service, "/v1/loras", "loras", Lora.read, asked)
        found = [lora for lora in loras if name_or_id.casefold() in (lora.id.casefold(), lora.name.casefold())]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(lora.id for lora in found)
            raise UnknownLora(f"{len(found)} LoRAs are called {name_or_id!r}: give an id ({ids})")
    known = ", ".join(sorted(lora.name for lora in loras)) or "none"
    raise UnknownLora(f"no LoRA {name_or_id!r} for this account (available: {known})")


def _add(
    service: Service,
    path: str | Path | None,
    fields: dict[str, Any],
    headers: dict[str, str],
    showing: AbstractContextManager[OnSent | None],
) -> Operation[Any]:
    """Add a LoRA by a POST that is safe to retry: the idempotency key returns the first one's LoRA.

    Large files are sent only if the account has no LoRA of these weights.
    """
    with showing as on_sent:
        if path is None:
            return (yield from service.ask("POST", "/v1/loras", fields, headers, timeout=CHECK_S))
        files = lora_files(Path(path))
        if sum(file.stat().st_size for file in files.values()) >= ASK_FROM_BYTES:
            with suppress(NotFound):
                asked = {**fields, "sha256": weights_sha256(files)}
                return (yield from service.ask("POST", "/v1/loras", asked, headers, timeout=CHECK_S))
        form = {name: ", ".join(text) if name == "trigger_words" else text for name, text in fields.items()}
        upload = Upload(form, files, on_sent)
        return (yield from service.ask("POST", "/v1/loras", None, headers, upload=upload, timeout=CHECK_S))
