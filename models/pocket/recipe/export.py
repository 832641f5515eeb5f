"""Exports the trained parts as a diffusers folder in half precision.

LoRAs, upscalers and checksums are written too.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from .plan import ROOT, WORK
from .text import MAX_TOKENS, load_tokenizer
from .training import noise_schedule

CHECKSUMS = ROOT / "SHA256SUMS"
ADAPTER = "style"
"""What the UNet calls the LoRA in training, whichever it is."""
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2")


def export_pipeline(
    unet: UNet2DConditionModel, vae: AutoencoderTiny, text_encoder: CLIPTextModel, folder: Path = ROOT
) -> None:
    """Write everything in float16 except the text encoder.

    transformers 5 would load the text encoder in the stored type, diffusers in float32.
    """
    pipeline = StableDiffusionPipeline(
        vae=vae.half(),
        text_encoder=text_encoder.float(),
        tokenizer=load_tokenizer(),
        unet=unet.half(),
        scheduler=noise_schedule(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(WORK / "tokenizer" / name, folder / "tokenizer" / name)
    _remove_local_paths(folder)


def lora_config(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LORA_TARGETS), init_lora_weights=True)


def export_lora(
    name: str, unet: UNet2DConditionModel, rank: int, folder: Path = ROOT / "loras", strength: float = 1.0
) -> None:
    """Write the UNet's adapter in diffusers' naming (`unet.….lora_A.weight`).

    Alpha is in the metadata: the rank times `strength`, how much more the adapter counts than in training.
    """
    alpha = round(rank * strength)
    state = get_peft_model_state_dict(unet, adapter_name=ADAPTER)
    tensors = {f"unet.{key}": value.to(torch.float16).contiguous().cpu() for key, value in state.items()}
    adapter = {"r": rank, "lora_alpha": alpha, "target_modules": list(LORA_TARGETS)}
    metadata = {
        "format": "pt",
        "name": name,
        "base_model": "pocket",
        "rank": str(rank),
        "alpha": str(alpha),
        "lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in adapter.items()}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{name}.safetensors", metadata=metadata)


def published_lora(name: str, folder: Path = ROOT / "loras") -> dict[str, torch.Tensor]:
    """Return what `export_lora` wrote, its strength aside, as `set_peft_model_state_dict` of the UNet takes it."""
    tensors = load_file(folder / f"{name}.safetensors")
    return {key.removeprefix("unet."): value.float() for key, value in tensors.items()}


def export_upscaler(scale: int, state: dict[str, torch.Tensor], folder: Path = ROOT / "upscaler") -> None:
    """Real-ESRGAN's compact architecture under its own key names (`body.N.weight`)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.to(torch.float16).contiguous().cpu() for key, value in state.items()}
    metadata = {"format": "pt", "architecture": "SRVGGNetCompact", "scale": str(scale)}
    save_file(tensors, folder / f"x{scale}.safetensors", metadata=metadata)


def write_checksums(folder: Path = ROOT) -> None:
    """Write one line per weight, configuration or vocabulary file, as `sha256sum --check` reads it."""
    suffixes = {".safetensors", ".json", ".txt"}
    parts = ("unet", "vae", "text_encoder", "tokenizer", "scheduler", "loras", "upscaler")
    files = [folder / "model_index.json"]
    files += [path for part in parts for path in sorted((folder / part).glob("*")) if path.suffix in suffixes]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}" for path in files]
    (folder / CHECKSUMS.name).write_text("\n".join(lines) + "\n")


def _remove_local_paths(folder: Path) -> None:
    """Configurations remember where they were loaded from; a published folder must not."""
    for path in folder.glob("*/*.json"):
        if path.name in ("vocab.json", "tokenizer.json"):
            continue
        content = json.loads(path.read_text())
        content.pop("_name_or_path", None)
        content.pop("is_local", None)
        content.pop("local_files_only", None)
        if path.parent.name == "vae":
            content.pop("block_out_channels", None)  # AutoencoderTiny registers it itself and warns of it in a file.
        if path.name == "tokenizer_config.json":
            content["model_max_length"] = MAX_TOKENS
        path.write_text(json.dumps(content, indent=2) + "\n")
