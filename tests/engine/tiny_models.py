"""Writes tiny random models of the true architectures, and LoRA files for them."""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serve_app.engine import AdapterFile

diffusers: Any = importlib.import_module("diffusers")
transformers: Any = importlib.import_module("transformers")

TRAINING = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
WINDOW = 16


def write_sd(
    folder: Path,
    *,
    prediction: str = "epsilon",
    context: int = 32,
    levels: int = 2,
    distilled: bool = False,
    seed: int = 0,
) -> Path:
    """Write Stable Diffusion 1.x, or 2.x with v prediction; latents are an eighth of the image.

    The UNet has `levels` levels. Where it is `distilled` it takes its guidance as an input, as in LCM's checkpoints.
    """
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64)[:levels],
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")[:levels],
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")[-levels:],
        cross_attention_dim=context,
        attention_head_dim=8,
        norm_num_groups=8,
        use_linear_projection=prediction != "epsilon",
        time_cond_proj_dim=16 if distilled else None,
    )
    scheduler = (diffusers.LCMScheduler if distilled else diffusers.DDIMScheduler)(
        **TRAINING, prediction_type=prediction, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )
    (diffusers.LatentConsistencyModelPipeline if distilled else diffusers.StableDiffusionPipeline)(
        vae=tiny_vae(),
        text_encoder=transformers.CLIPTextModel(clip_config(context)),
        tokenizer=clip_tokenizer(folder / "vocabulary"),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def write_sdxl(folder: Path, *, seed: int = 0) -> Path:
    """SDXL: two text encoders of different widths, pooled embeddings, time ids."""
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=2,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=80,
        norm_num_groups=8,
    )
    diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=transformers.CLIPTextModel(clip_config(32)),
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config(48)),
        tokenizer=clip_tokenizer(folder / "vocabulary"),
        tokenizer_2=clip_tokenizer(folder / "vocabulary"),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(**TRAINING, timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    ).save_pretrained(folder)
    return folder


def tiny_vae(**config: Any) -> Any:
    """Return the autoencoder of Stable Diffusion, or of another family by its configuration."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=4, sample_size=64,
        **{"latent_channels": 4, "scaling_factor": 0.18215, **config},
    )  # fmt: skip


def clip_config(width: int) -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        projection_dim=32,
        bos_token_id=len(_vocabulary()) - 2,
        eos_token_id=len(_vocabulary()) - 1,
        pad_token_id=len(_vocabulary()) - 1,
    )


def _vocabulary() -> list[str]:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [str(digit) for digit in range(10)]
    return [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]


def clip_tokenizer(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(_vocabulary())}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=WINDOW)


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
EVERYTHING = (
    *ATTENTION,
    "ff.net.0.proj",
    "ff.net.2",
    "proj_in",
    "proj_out",
    "conv1",
    "conv2",
    "time_emb_proj",
    "conv_shortcut",
)
TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "o_proj", "gate_proj", "up_proj", "down_proj",
        "Attention.q", "Attention.k", "Attention.v", "Attention.o", "wi_0", "wi_1", "wo")  # fmt: skip


def random_lora(
    folder: Path,
    *,
    rank: int,
    seed: int,
    targets: Sequence[str] = ATTENTION,
    text: bool = False,
    size: float = 0.15,
    denoiser: str = "unet",
    dora: bool = False,
    input_gains: bool = False,
) -> dict[str, torch.Tensor]:
    """Return LoRA tensors for a model folder under PEFT's names, strong enough to change the image.

    `dora` adds PEFT's magnitudes, `input_gains` those of LyCORIS per input.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for component in (denoiser, "text_encoder", "text_encoder_2", "text_conditioner"):
        if not (folder / component).is_dir() or (component != denoiser and not text):
            continue
        for name, shape in _weights(folder / component).items():
            if name.endswith(tuple(targets) if component == denoiser else TEXT) and "visual." not in name:
                down = torch.randn(rank, *shape[1:], generator=generator) * size
                up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2), generator=generator) * size
                tensors |= {f"{component}.{name}.lora_A.weight": down, f"{component}.{name}.lora_B.weight": up}
                if dora:
                    magnitude = torch.rand(shape[0], generator=generator) * 0.4 + 0.4
                    tensors[f"{component}.{name}.lora_magnitude_vector.weight"] = magnitude
                if input_gains:
                    sides = (1, shape[1], *(1,) * (len(shape) - 2))
                    tensors[f"{component}.{name}.dora_scale"] = torch.rand(sides, generator=generator) * 0.4 + 0.4
    return tensors


def kohya_names(
    tensors: Mapping[str, torch.Tensor], *, alpha: float, prefixes: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the same weights under the names kohya's trainer writes, with an alpha; `prefixes` by component."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        component, _, rest = name.partition(".")
        layer, _, part = rest.rpartition(".lora_")
        layer = "text_model." + layer.removeprefix("text_model.") if component.startswith("text") else layer
        stem = prefixes[component] + "_" + layer.replace(".", "_")
        renamed[f"{stem}.lora_{'down' if part.startswith('A') else 'up'}.weight"] = tensor
        renamed[f"{stem}.alpha"] = torch.tensor(alpha)
    return renamed


def write_lora(path: Path, folder: Path, **options: Any) -> AdapterFile:
    """Write a random LoRA for the model in `folder`, with the options of `random_lora`."""
    return write_adapter(path, random_lora(folder, **options))


def write_adapter(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any] | None = None
) -> AdapterFile:
    """Write a safetensors file; return it with its identity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notes = {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=notes)
    return AdapterFile(id=hashlib.sha256(path.read_bytes()).hexdigest(), path=path)


def _weights(component: Path) -> dict[str, list[int]]:
    """Return the shape of every layer's weight in a saved component, by layer."""
    with safe_open(next(component.glob("*.safetensors")), framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(".weight")]  # noqa: SIM118
        return {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in names}
