"""`client.loras`: the LoRAs that an account may use, and its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve_app.client.lora_protocol import LoraService, base_of, changed_fields, described
from serve_app.client.progress_bar import upload_progress
from serve_app.client.protocol import Operation, Service
from serve_app.client.records import Lora
from serve_app.client.upload import OnSent


class Loras:
    """The LoRAs that this account may use, and its own, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._loras, self._execute = LoraService(service), execute

    def list(self, *, base_model: str | None = None, q: str | None = None) -> list[Lora]:
        """All of them, newest first; of one base model, or with `q` in name, description or trigger words."""
        return self._execute(self._loras.list(base_model, q))

    def get(self, lora_id: str) -> Lora:
        """One of them. Raises `NotFound`."""
        return self._execute(self._loras.get(lora_id))

    def add(
        self, path: str | Path | None = None, *, source: str | None = None, base: str | None = None, base_model: str | None = None,
        name: str | None = None, description: str = "", trigger_words: Sequence[str] = (), progress: bool = False,
        on_progress: OnSent | None = None, idempotency_key: str | None = None,
    ) -> Lora:  # fmt: skip
        """Upload a safetensors file, or a folder as PEFT saves one, for the base model `base`.

        It can be used at once. With `source` in place of a path the service fetches it, from where its operator allows: `s3://…`, `hf://…`.
        `progress` shows a bar of the upload; `on_progress` is called with the bytes sent and the bytes in all. Weights that the
        account has already give the LoRA that has them, and are not sent again from 8 MiB on. `base_model` is another name of
        `base`. Raises `InvalidRequest` with the reason for a file that does not fit, `Conflict` over the plan's quota.
        """
        fields = described(name, path or source or "", base_of(base, base_model), description, trigger_words)
        with upload_progress(fields["name"], on_progress, shows_bar=progress) as on_sent:
            return self._execute(self._loras.add_from(path, source, fields, on_sent, idempotency_key))

    def update(
        self, lora_id: str, *, name: str | None = None, description: str | None = None,
        trigger_words: Sequence[str] | None = None,
    ) -> Lora:  # fmt: skip
        """Change what is given of an own one. Raises `NotFound`."""
        return self._execute(self._loras.update(lora_id, changed_fields(name, description, trigger_words)))

    def delete(self, lora_id: str) -> None:
        """Delete an own one: jobs that wait for it or run with it end as failed. Raises `NotFound`."""
        self._execute(self._loras.delete(lora_id))

    def share(self, lora_id: str, account: str) -> Lora:
        """Let another account, by its id or name, use an own one. Raises `NotFound`."""
        return self._execute(self._loras.share(lora_id, account))

    def unshare(self, lora_id: str, account: str) -> None:
        """End what `share` began. Raises `NotFound`."""
        self._execute(self._loras.unshare(lora_id, account))
