"""SD 1.5 and SDXL at their true size with random weights, and adapters for them.

The pipelines are those of the published configs. Where they are made on `meta` they take no memory.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from serve_app.engine.lora_layers import LoRALayer
from tests.engine.tiny_anima import t5_tokenizer
from tests.engine.tiny_flux1 import letter_tokenizer
from tests.engine.tiny_krea2 import tokenizer as krea2_tokenizer
from tests.engine.tiny_qwen_image21 import Words
from tests.engine.tiny_z_image import VAE, byte_tokenizer

diffusers: Any = importlib.import_module("diffusers")
transformers: Any = importlib.import_module("transformers")

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "pocket" / "tokenizer"
TRAINING = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "timestep_spacing": "leading",
}


LARGE_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 1024,
}


def random_pipeline(name: str, device: torch.device, *, tiny: bool = False) -> Any:
    """Return `sd15` or `sdxl` with random weights, from the published configs; `tiny` has few channels and layers."""
    with torch.device(device):
        parts = (_sd15 if name == "sd15" else _sdxl)(tiny)
    parts["scheduler"] = diffusers.EulerDiscreteScheduler(**TRAINING)
    if name == "sdxl":
        tokenizers = {"tokenizer": _tokenizer(), "tokenizer_2": _tokenizer()}
        return diffusers.StableDiffusionXLPipeline(**parts, **tokenizers, add_watermarker=False)
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return diffusers.StableDiffusionPipeline(**parts, tokenizer=_tokenizer(), **none)


def random_z_image(device: torch.device) -> Any:
    """Return Z-Image-Turbo with random weights, from the published configs; its tokenizer has a token for each byte."""
    with torch.device(device):
        transformer = diffusers.ZImageTransformer2DModel()
        vae = diffusers.AutoencoderKL(**LARGE_VAE | VAE)
        encoder = transformers.Qwen3Model(_qwen3_4b())
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae, text_encoder=encoder, tokenizer=byte_tokenizer(), transformer=transformer,
    )  # fmt: skip


def random_flux2_klein(device: torch.device) -> Any:
    """Return the distilled FLUX.2 klein 4B with random weights, from the published configs."""
    with torch.device(device):
        transformer = diffusers.Flux2Transformer2DModel(
            num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
        )
        vae = diffusers.AutoencoderKLFlux2(**LARGE_VAE, latent_channels=32)
        encoder = transformers.Qwen3ForCausalLM(_qwen3_4b())
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae, text_encoder=encoder, tokenizer=byte_tokenizer(), transformer=transformer, is_distilled=True,
    )  # fmt: skip


def random_qwen_image21(device: torch.device) -> Any:
    """Return Qwen-Image 2.1 with random weights, from diffusers' defaults and Qwen3-VL-8B's config."""
    with torch.device(device):
        transformer = diffusers.QwenImage21Transformer2DModel()
        vae = diffusers.AutoencoderKLQwenImage21()
        encoder = transformers.Qwen3VLForConditionalGeneration(QWEN3_VL_8B)
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=vae, text_encoder=encoder, processor=Words(byte_tokenizer()), transformer=transformer,
    )  # fmt: skip


QWEN3_VL_8B = transformers.Qwen3VLConfig(
    text_config={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    },
    vision_config={
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 2304,
    },
)  # fmt: skip


def random_anima(device: torch.device) -> Any:
    """Return Anima with random weights, by the widths of its adapters and of its text encoder."""
    with torch.device(device):
        parts = {
            "transformer": diffusers.CosmosTransformer3DModel(
                num_attention_heads=16, extra_pos_embed_type=None, rope_scale=(1.0, 4.0, 4.0)
            ),
            "text_conditioner": diffusers.AnimaTextConditioner(),
            "text_encoder": transformers.Qwen3Model(transformers.Qwen3Config(**QWEN3_06B)),
            "vae": diffusers.AutoencoderKLQwenImage(),
        }
    pipeline = diffusers.AnimaAutoBlocks().init_pipeline()
    pipeline.update_components(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), tokenizer=byte_tokenizer(),
        t5_tokenizer=t5_tokenizer(), **parts,
    )  # fmt: skip
    return pipeline


def random_flux1(device: torch.device) -> Any:
    """Return FLUX.1 dev with random weights, from the published configs; its T5 reads letters."""
    with torch.device(device):
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        vae = diffusers.AutoencoderKL(**LARGE_VAE | VAE)
        clip = transformers.CLIPTextModel(_clip(False, projection_dim=768))
        t5 = transformers.T5EncoderModel(t5_xxl())
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae, text_encoder=clip, tokenizer=_tokenizer(), text_encoder_2=t5, tokenizer_2=letter_tokenizer(),
        transformer=transformer,
    )  # fmt: skip


def t5_xxl() -> Any:
    return transformers.T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip


def random_krea2(device: torch.device) -> Any:
    """Return Krea 2 Turbo with random weights, from the published configs, but for the text encoder's vision."""
    with torch.device(device):
        transformer = diffusers.Krea2Transformer2DModel()
        vae = diffusers.AutoencoderKLQwenImage()
        encoder = transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config=QWEN3_4B))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
    )
    return diffusers.Krea2Pipeline(
        scheduler=scheduler, vae=vae, text_encoder=encoder, tokenizer=krea2_tokenizer(), transformer=transformer,
        is_distilled=True,
    )  # fmt: skip


QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip


QWEN3_06B = {
    **QWEN3_4B, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
}  # fmt: skip


def _qwen3_4b() -> Any:
    return transformers.Qwen3Config(**QWEN3_4B)


def _sd15(tiny: bool) -> dict[str, Any]:
    """Return the parts of stable-diffusion-v1-5."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(32, 64, 64, 64) if tiny else (320, 640, 1280, 1280),
        cross_attention_dim=768,
        attention_head_dim=8,
    )
    return {"unet": unet, "vae": _vae(0.18215, 512, tiny), "text_encoder": transformers.CLIPTextModel(_clip(tiny))}


def _sdxl(tiny: bool) -> dict[str, Any]:
    """Return the parts of stable-diffusion-xl-base-1.0."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(32, 64, 64) if tiny else (320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2) if tiny else (1, 2, 10),
        attention_head_dim=(1, 2, 2) if tiny else (5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    large = _clip(
        tiny, hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=32,
        projection_dim=1280, hidden_act="gelu",
    )  # fmt: skip
    return {
        "unet": unet,
        "vae": _vae(0.13025, 1024, tiny),
        "text_encoder": transformers.CLIPTextModel(_clip(tiny, projection_dim=768)),
        "text_encoder_2": transformers.CLIPTextModelWithProjection(large),
    }


def _clip(tiny: bool, **config: Any) -> Any:
    base = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    return transformers.CLIPTextConfig(**base | config | ({"num_hidden_layers": 2} if tiny else {}))


def _vae(scaling: float, side: int, tiny: bool) -> Any:
    sides = {"sample_size": side} | ({"block_out_channels": (32,) * 4} if tiny else {})
    return diffusers.AutoencoderKL(**LARGE_VAE | sides, latent_channels=4, scaling_factor=scaling)


def _tokenizer() -> Any:
    """Return the pocket model's, given CLIP's window: random weights read any ids."""
    return transformers.CLIPTokenizer.from_pretrained(str(TOKENIZER), model_max_length=77)


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TRANSFORMER = (*ATTENTION, "ff.net.0.proj", "ff.net.2")


def random_adapter(
    denoiser: torch.nn.Module,
    path: Path,
    rank: int,
    seed: int,
    targets: Sequence[str] = TRANSFORMER,
    component: str = "unet",
) -> Path:
    """Write a random adapter in float16 for the layers whose names end in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in denoiser.named_modules():
        if not name.endswith(tuple(targets)) or isinstance(module, LoRALayer) or not hasattr(module, "weight"):
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        tensors[f"{component}.{name}.lora_A.weight"] = torch.randn(rank, *weight.shape[1:], generator=generator) * 0.02
        tensors[f"{component}.{name}.lora_B.weight"] = (
            torch.randn(weight.shape[0], rank, *(1,) * (weight.dim() - 2), generator=generator) * 0.02
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    return path
