"""Z-Image and Z-Image-Turbo: a diffusion transformer over image and caption tokens, a Qwen3 text encoder and a VAE."""

from typing import Any

from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from torch import Tensor

from serve_app.engine.families.dit import (
    PATCH,
    TransformerFamily,
    bucket_of,
    original_names,
    refuse_wrong_text_parts,
    refuse_wrong_vae,
)
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.z_image_transformer import ZImageTransformer, padded_length
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest

_ORIGINAL_NAMES = {
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
    "attention.to_out.0": "attention.out",
}
"""Parts of the transformer's layer names as diffusers and as the original code write them."""


class ZImageFamily(TransformerFamily):
    """One loaded base model of the family; see `Family`.

    A request's guidance w is g + 1 of diffusers' pipeline, which adds g times the difference to the prompt's velocity:
    either way 1 means none.
    """

    convert = staticmethod(convert_z_image_transformer_checkpoint_to_diffusers)

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = ZImageTransformer(plain)
        layers = wrap_layers(transformer)
        aliases = original_names(layers, _ORIGINAL_NAMES)
        blocks = [layer.removesuffix(".to_q") for layer in layers if layer.endswith(".to_q")]
        fused = {f"{block}.qkv": [f"{block}.to_{part}" for part in "qkv"] for block in blocks}
        return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"), fused)

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        config = pipeline.transformer.config
        if config.get("siglip_feat_dim") is not None or list(config.all_patch_size) != [PATCH]:
            raise ValueError("the transformer is of another Z-Image, such as Omni, which this service does not run")
        refuse_wrong_vae(pipeline, config.in_channels)
        refuse_wrong_text_parts(pipeline, config.cap_feat_dim)

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return ".attention." in layer or ".feed_forward." in layer

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        del pause  # a text has at most `MAX_TOKENS`
        prompts = [request.negative_prompt, request.prompt] if request.guidance > 1 else [request.prompt]
        captions = self.captions(prompts, request, adapter_id)
        lengths = [padded_length(len(caption)) for caption in captions]
        return self.in_bucket(request, captions, lengths, bucket_of(lengths))

    def hidden_states(self, prompt: str) -> Tensor:
        return self.read(prompt)[-2][0]

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Refine each caption alone at its own length, as diffusers does for it alone."""
        context, added = conditioning.context, conditioning.added
        rows, bucket, _ = context.shape
        refined = context.new_zeros(rows, bucket, self.transformer.config.dim)
        for row, tokens in enumerate(added["tokens"].tolist()):
            own = padded_length(tokens)
            places = added["rope"][row : row + 1, -bucket:][:, :own]
            refined[row, :own] = self.transformer.refine(context[row : row + 1, :tokens], places)[0]
        return conditioning._replace(context=refined, added={name: added[name] for name in ("rope", "masked")})

    # -- noise, steps and pixels -----------------------------------------------------------------------------------

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        context, added = conditioning.context, conditioning.added
        velocity = self.lanes[lane].module(
            latents.to(self.dtype), (1000 - timesteps) / 1000, context, added["rope"], added["masked"]
        )
        return -velocity.float()
