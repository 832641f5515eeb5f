"""Writes base models of any size that take no room on the disk: true configurations, headers and lengths, no weights.

Such a file is sparse. Its header says what a real one's would, so that whatever reads headers alone cannot tell.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.true_models import (
    random_anima,
    random_flux1,
    random_flux2_klein,
    random_krea2,
    random_pipeline,
    random_qwen_image21,
    random_z_image,
)

KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
TRANSFORMERS = {
    "z-image": random_z_image, "klein": random_flux2_klein, "krea2": random_krea2, "anima": random_anima,
    "flux1": random_flux1, "qwen-image-2.1": random_qwen_image21,
}  # fmt: skip


def write_hollow(folder: Path, name: str, dtype: torch.dtype = torch.float16) -> Path:
    """Write `sd15`, `sdxl` or a model of `TRANSFORMERS` as diffusers does, with holes for weights."""
    meta = torch.device("meta")
    pipeline = TRANSFORMERS[name](meta) if name in TRANSFORMERS else random_pipeline(name, meta)
    folder.mkdir(parents=True)
    (folder / pipeline.config_name).write_text(
        json.dumps({"_class_name": type(pipeline).__name__, **pipeline.config}, default=str)
    )
    for part, component in pipeline.components.items():
        if component is not None and hasattr(component, "config"):
            (folder / part).mkdir()
            config: Any = component.config
            text = config.to_json_string() if hasattr(config, "to_json_string") else json.dumps(dict(config))
            (folder / part / "config.json").write_text(text)
        if isinstance(component, nn.Module):
            write_hollow_file(folder / part / "model.safetensors", component.to(dtype).state_dict())
    return folder


def write_hollow_file(path: Path, tensors: dict[str, Tensor]) -> Path:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
