"""Qwen-Image 2.1: a transformer over captions that are read in order and images, a Qwen3-VL that reads the prompt, a VAE.

It is meant to be drawn without guidance; a negative prompt asks for it.
"""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers
from torch import Tensor, nn

from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import language_model
from serve_app.engine.families.dit import PATCH, TransformerFamily, bucket_of
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.qwen_image21_transformer import QwenImage21Transformer
from serve_app.engine.families.qwen_vae import normalized
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine_options import EngineOptions

CAPTION_BUCKETS = (64, 128, 256, 512, 1024)
"""Runs share forward passes where the longer of their two captions fits the same of these counts of tokens."""
MASK_MULTIPLE = 8
"""Operators of attention take a mask of so many tokens, or a multiple, as it is."""
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
"""What the text encoder reads before and after a prompt. The transformer takes what follows the system's part."""

VAE_CLASS = "AutoencoderKLQwenImage21"
DECODING_WIDTHS = 7.5
"""Decoding takes three tensors of the image's size and so many times the VAE's least width: 6,432 bytes a pixel in 16 bits
(counted on torch's meta device)."""


class QwenImage21Family(TransformerFamily):
    """One loaded base model of the family; see `Family`."""

    parts = ("transformer", "vae", "text_encoder", "processor", "scheduler")
    convert = staticmethod(convert_qwen_image21_transformer_checkpoint_to_diffusers)
    max_encoded_prompts = 64
    """Each encoded prompt takes up to 8.4 MB in 16 bits."""

    def __init__(self, pipeline: Any, options: EngineOptions, **given: Any) -> None:
        self._sample_sigmas: Sequence[float] = pipeline.config.get("sample_sigmas") or [1.0]
        self._system, self._after = (pipeline.tokenizer(part).input_ids for part in (SYSTEM, AFTER))
        self.room = len(self._system) + CAPTION_BUCKETS[-1] - len(self._after)
        pipeline.vae, language_model(pipeline.text_encoder).norm = PictureVAE(pipeline.vae), nn.Identity()
        del pipeline.transformer.time_text_embed.time_proj  # on the meta device where weights are of a single file
        super().__init__(pipeline, options, **given)

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = QwenImage21Transformer(plain)
        layers = wrap_layers(transformer)
        blocks = [layer.removesuffix(".gate_layer") for layer in layers if layer.endswith(".gate_layer")]
        fused = {f"{block}.gate_up": [f"{block}.gate_layer", f"{block}.proj"] for block in blocks}
        return Component(transformer, layers, {}, ("lora_unet_", "lora_transformer_"), fused)

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        transformer, vae = pipeline.transformer.config, pipeline.vae
        made = vae.config.get("z_dim") if type(vae).__name__ == VAE_CLASS else f"those of {type(vae).__name__}"
        if made != transformer.in_channels:
            raise ValueError(
                f"the transformer takes {transformer.in_channels} channels of {VAE_CLASS} and the VAE makes {made}: "
                "name the VAE that it was trained with as `vae:`"
            )
        encoder, tokenizer = language_model(pipeline.text_encoder).config, pipeline.tokenizer
        if encoder.hidden_size != transformer.context_in_dim:
            raise ValueError(
                f"the transformer takes captions {transformer.context_in_dim} wide and the text encoder makes "
                f"{encoder.hidden_size}: name the Qwen3-VL that it was trained with as `text_encoder:`"
            )
        if "<|im_start|>" not in tokenizer.get_vocab() or len(tokenizer) > encoder.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens and is not that of the text encoder, which knows "
                f"{encoder.vocab_size}: name the text encoder's own as `tokenizer:`"
            )

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return layer.startswith("transformer_blocks.")

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        """Encode the prompts, the negative one only where there is one: the pipeline guides by no empty one."""
        del pause  # a text has at most the tokens of the largest bucket
        is_guided = request.guidance > 1 and request.negative_prompt
        captions = self.captions([request.negative_prompt, request.prompt][not is_guided :], request, adapter_id)
        lengths = [len(caption) for caption in captions]
        height, width = self.tokens(request)
        bucket = bucket_of(lengths, CAPTION_BUCKETS) + -height * width % MASK_MULTIPLE
        return self.in_bucket(request, captions, lengths, bucket)

    def templated(self, prompt: str) -> str:
        return SYSTEM + BEFORE + (prompt or " ")

    def hidden_states(self, prompt: str) -> Tensor:
        """Return the states of the prompt, cut at the largest bucket, and of what follows, without the system's."""
        ids = self.tokenizer(self.templated(prompt), truncation=True, max_length=self.room).input_ids
        read = torch.tensor([[*ids, *self._after]], device=self.text_encoder.device)
        return self.text_encoder(read, use_cache=False).last_hidden_state[0, len(self._system) :]

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Embed each caption alone at its own length: no step and no place changes that."""
        context, added = conditioning.context, conditioning.added
        embedded = context.new_zeros(*context.shape[:2], self.transformer.img_in.fan_out)
        for row, tokens in enumerate(added["tokens"].tolist()):
            embedded[row, :tokens] = self.transformer.txt_in(context[row : row + 1, :tokens])[0]
        return conditioning._replace(context=embedded, added={name: added[name] for name in ("rope", "masked")})

    # -- noise, steps and pixels -----------------------------------------------------------------------------------

    def tokens(self, request: RunRequest) -> tuple[int, int]:
        """Return the image's height and width in tokens, which come in pairs."""
        height, width = super().tokens(request)
        return PATCH * height, PATCH * width

    def noise_levels(self, steps: int) -> Sequence[float]:
        """Return the levels that the model's author chose, even ones or what `model_index.json` says.

        Another number of steps than the author's takes what lies between.
        """
        places = np.linspace(0, len(self._sample_sigmas), steps, endpoint=False)
        return np.interp(places, np.arange(len(self._sample_sigmas) + 1), [*self._sample_sigmas, 0.0]).tolist()

    def make_autoencoder(self) -> Autoencoder:
        return normalized(self.vae)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        return self.transformer.config.in_channels, *self.tokens(request)


class PictureVAE(nn.Module):
    """diffusers' VAE, which takes and makes single frames with an alpha channel, as one of pictures in RGB."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain, self._lock = plain, threading.Lock()
        for layer in list(plain.modules()):
            if hasattr(layer, "time_conv"):
                del layer.time_conv  # the first frame passes it by
        config, levels = plain.config, len(plain.config.temperal_downsample) + 1
        width = int(DECODING_WIDTHS * (config.decoder_base_dim or config.base_dim))
        # What others' VAEs say by these names: the side of a cell, and what decoding takes, as `limit_decoding` counts.
        said = {"block_out_channels": [width] * levels, "latent_channels": config.z_dim, "force_upcast": True}
        self.config = FrozenDict({**config, **said})

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def decoder(self) -> nn.Module:
        return self.plain.decoder

    def enable_tiling(self) -> None:
        """Decode in tiles of the sides that were set before, which overlap by a quarter."""
        side: Any = self.tile_sample_min_size
        self.plain.enable_tiling(side, side, side * 3 // 4, side * 3 // 4)

    def encode(self, pixels: Tensor) -> Any:
        """Encode opaque pixels [1, 3, height, width]."""
        opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        with self._lock:  # it keeps its place in what it computes in itself
            made = self.plain.encode(opaque[:, :, None]).latent_dist
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=made.mean[:, :, 0], std=made.std[:, :, 0]))

    def decode(self, latents: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        """Return the pixels [1, 3, height, width] of a picture on white."""
        del return_dict
        with self._lock:
            made = self.plain.decode(latents[:, :, None], return_dict=False)[0][:, :, 0].float()
        opacity = (made[:, 3:] + 1) / 2
        return (made[:, :3] * opacity + 1 - opacity,)
