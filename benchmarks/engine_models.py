"""Models of the engine benchmark: the pocket model, or SD 1.5 and SDXL with random weights."""

import copy
import hashlib
import importlib
import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.families.checkpoint import load_pipeline
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.lora_layers import LoRALayer

diffusers: Any = importlib.import_module("diffusers")
transformers: Any = importlib.import_module("transformers")

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
PROMPTS = (
    "a red circle on a blue background",
    "a green star on a white background",
    "a yellow heart",
    "a purple triangle",
)
TRAINING = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False}


class BenchmarkModel(NamedTuple):
    """A model, its adapters as files, and the size its images are made at."""

    name: str
    pipeline: Any
    adapters: list[AdapterFile]
    side: int
    options: EngineOptions

    def engine(self, **changes: Any) -> Engine:
        """Return a fresh engine over a copy of the model, so that no two engines share state."""
        options = replace(self.options, **changes)
        engine = Engine(options)
        family = UNetFamily(copy.deepcopy(self.pipeline), options)
        engine.base_models = {self.name: BaseModel(self.name, family, options, lambda: None)}
        return engine

    def wall(self) -> float:
        """Return seconds by the clock, once the device has finished."""
        self._wait()
        return time.perf_counter()

    def work(self) -> float:
        """Return seconds of processor time; on a GPU, which has no such clock, by the clock."""
        return self.wall() if self._is_gpu else time.process_time()

    def thread_work(self) -> float:
        """Return what `work` does, for this thread alone."""
        return self.wall() if self._is_gpu else time.thread_time()

    @property
    def _is_gpu(self) -> bool:
        return torch_device(self.options).type == "cuda"

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def requests(self, count: int, *, adapters: int, steps: int, first: int = 0) -> list[RunRequest]:
        """`count` runs over `adapters` adapters in turn, with different prompts, seeds and guidance."""
        files = itertools.cycle(self.adapters[:adapters]) if adapters else itertools.repeat(None)
        return [
            RunRequest(
                run_id=f"{first + i}",
                prompt=PROMPTS[i % len(PROMPTS)],
                adapter=file,
                scale=(0.75, 1.0, 0.5)[i % 3],
                seed=first + i,
                steps=steps,
                guidance=5.0 + i % 4,
                width=self.side,
                height=self.side,
            )
            for i, file in zip(range(count), files, strict=False)
        ]


def make_model(name: str, options: EngineOptions, into: Path, *, adapters: int, rank: int, side: int) -> BenchmarkModel:
    """Return the model `name`: pocket, sd15 or sdxl.

    `rank` is that of the adapters made here; the pocket model brings eight of its own.
    """
    torch.manual_seed(0)
    pipeline = load_pipeline(POCKET, torch_dtype(options)) if name == "pocket" else _RANDOM[name]()
    pipeline.to(torch_device(options), torch_dtype(options))
    for part in (pipeline.unet, pipeline.vae):  # for every policy alike
        part.to(memory_format=torch.channels_last)
    pipeline.set_progress_bar_config(disable=True)
    own = sorted((POCKET / "loras").glob("*.safetensors")) if name == "pocket" else []
    files = [Path(shutil.copy(file, into)) for file in own]  # the same bytes to the end, whatever is trained meanwhile
    targets = ("conv1", "conv2", *ATTENTION) if name == "pocket" else (*ATTENTION, *FEED_FORWARD)
    files += [
        _random_adapter(pipeline.unet, into / f"random{i}.safetensors", rank, i, targets)
        for i in range(adapters - len(files))
    ]
    ready = [AdapterFile(hashlib.sha256(file.read_bytes()).hexdigest(), file) for file in files]
    return BenchmarkModel(name, pipeline, ready[:adapters], side, options)


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")


def _random_adapter(unet: torch.nn.Module, path: Path, rank: int, seed: int, targets: Sequence[str]) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in unet.named_modules():
        if not name.endswith(tuple(targets)) or isinstance(module, LoRALayer) or not hasattr(module, "weight"):
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        tensors[f"unet.{name}.lora_A.weight"] = torch.randn(rank, *weight.shape[1:], generator=generator) * 0.02
        tensors[f"unet.{name}.lora_B.weight"] = (
            torch.randn(weight.shape[0], rank, *(1,) * (weight.dim() - 2), generator=generator) * 0.02
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    return path


def _sd15() -> Any:
    """Return the architecture of stable-diffusion-v1-5, from its published configs."""
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    scheduler = diffusers.EulerDiscreteScheduler(**{k: v for k, v in TRAINING.items() if k != "clip_sample"})
    return diffusers.StableDiffusionPipeline(
        vae=_vae(0.18215, 512),
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12)
        ),
        tokenizer=_tokenizer(),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl() -> Any:
    """Return the architecture of stable-diffusion-xl-base-1.0, from its published configs."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    small = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, projection_dim=768
    )
    large = transformers.CLIPTextConfig(
        hidden_size=1280,
        intermediate_size=5120,
        num_attention_heads=20,
        num_hidden_layers=32,
        projection_dim=1280,
        hidden_act="gelu",
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(0.13025, 1024),
        text_encoder=transformers.CLIPTextModel(small),
        text_encoder_2=transformers.CLIPTextModelWithProjection(large),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(**{k: v for k, v in TRAINING.items() if k != "clip_sample"}),
        add_watermarker=False,
    )


def _vae(scaling: float, side: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=scaling,
        sample_size=side,
    )


def _tokenizer() -> Any:
    """Return the pocket model's, given CLIP's window: random weights read any ids."""
    return transformers.CLIPTokenizer.from_pretrained(str(POCKET / "tokenizer"), model_max_length=77)


_RANDOM = {"sd15": _sd15, "sdxl": _sdxl}
