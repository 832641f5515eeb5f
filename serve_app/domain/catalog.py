"""Base models and LoRA adapters on offer, as data."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A base model: a diffusers folder, or one safetensors file and the folder that describes its architecture."""

    id: str
    source: str
    config: str = ""
    """For a file: a diffusers folder of the same architecture, whose weights are not read. Empty for a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter: `lora_id` of variant A, `model_id` of variant B.

    `file` is a URI of a safetensors file; `sha256` (hex) is the identity of its weights;
    `accounts` names who may use it, and None means everyone.
    """

    id: str
    name: str
    description: str
    created_at: datetime
    file: str
    sha256: str
    base_model: str
    accounts: frozenset[str] | None = None

    def is_open_to(self, *names: str) -> bool:
        """Whether the catalog file lets an account of one of these names use it. Grants and denials take precedence."""
        return self.accounts is None or not self.accounts.isdisjoint(names)
