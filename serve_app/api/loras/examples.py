"""Examples of the LoRAs document."""

from typing import Any

_LORA: dict[str, Any] = {
    "id": "model_nq6w3s5kfrzp2xvd7bmtch4ylu",
    "name": "Ink",
    "description": "Thin black lines on paper.",
    "trigger_words": ["ink drawing"],
    "base_model": "pocket",
    "created_at": "2026-11-21T12:00:00Z",
    "is_own": True,
    "sha256": "9f" * 32,
    "size_bytes": 401221,
    "found": {
        "summary": "SDXL, rank 16, attention and convolution, from sd-scripts",
        "family": "SDXL",
        "rank": 16,
        "layers": 722,
        "targets": ["attention", "convolution"],
        "components": ["unet"],
        "writer": "sd-scripts",
        "algorithm": "LoRA",
        "suggested_trigger_words": ["ink drawing", "paper"],
    },
    "sample_url": "https://api.example.com/files/images/…/0.png?exp=…&kid=…&sig=…",
}
_METADATA = {"ss_base_model_version": "sdxl_base_v1-0", "ss_num_train_images": "40", "ss_learning_rate": "0.0001"}
_WHOLE: dict[str, Any] = {**_LORA, "found": {**_LORA["found"], "metadata": _METADATA}}
LORA = {"LoRA": {**_WHOLE, "shared_with": []}}
SHARED = {"Shared": {**_WHOLE, "shared_with": [{"account_id": "acct_c4zq2e7wvbbxm5l3r6yhtajd2i", "name": "zeta"}]}}
LORAS = {"LoRAs": {"loras": [_LORA]}}
FORM = {"File": {"name": "Ink", "base_model": "pocket", "trigger_words": "ink drawing", "file": "@ink.safetensors"}}
REFERENCES = {
    "Known weights": {"name": "Ink", "base_model": "pocket", "sha256": "9f" * 32},
    "Fetched": {"name": "Ink", "base_model": "pocket", "source": "s3://acme-loras/ink.safetensors"},
}
CHANGE = {"Rename": {"name": "Ink on paper"}, "Words": {"trigger_words": ["ink drawing", "paper"]}}
GRANT = {"By name": {"account": "zeta"}}
