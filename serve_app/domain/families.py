"""Every family of base models: what may be asked of it, what it costs, and how its files are known.

A family's entry here is all that interfaces, jobs and LoRAs know of it; its code is the class of the same name in
`serve_app/engine/families/registry.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serve_app.domain.samplers import Sampler


class Usual(NamedTuple):
    """What images of a base model look best with, where its catalog row says nothing else; None: what is usual."""

    steps: int | None = None
    guidance: float | None = None


class Abilities(NamedTuple):
    """What may be asked of a base model. Sides are in pixels, multiples of 8."""

    usual_side: int = 1024
    """Images have this width and height where a request names none."""
    longest_side: int = 1536
    prompt_weights: bool = False
    """Whether `(red:1.5)` in a prompt can weight its words."""
    begins_late: bool = True
    """Whether an image that another is begun from leaves out steps, by its strength, and a mask can keep a part of it.

    Otherwise every step looks at it as a whole.
    """
    rounds_down: bool = False
    """Whether a low strength can leave no step."""
    samplers: Sequence[Sampler] = (Sampler.FLOW_EULER,)
    text: range = range(0, 513)
    """The denoiser reads this many tokens of each prompt: longer ones are cut, and shorter ones are padded."""
    megapixels_per_byte: float = 256 / 1e6
    """Each byte of the prompt adds this many megapixels to a step: in a transformer, those of a token of the image."""
    usual: Usual = Usual()
    usual_distilled: Usual = Usual()
    """What images of a base model look best with that draws in few steps without guidance."""

    def text_bytes(self, prompt: str) -> int:
        """Return the number of bytes that a prompt's encoding is priced by; a token has at least one."""
        return min(max(len(prompt.encode()), self.text.start), self.text.stop - 1)


class Marks(NamedTuple):
    """How files of a base model and of its adapters are known, by regular expressions; an empty one knows none."""

    name: str
    """Messages call the base model by this name."""
    layers: str = ""
    """It is searched in names of the denoiser's layers, as its adapters write them too."""
    checkpoint: str = ""
    """The whole name of a tensor in a file of the denoiser in its original layout, without the model's prefix."""
    declared: str = ""
    """How the base model's name in the metadata of sd-scripts, ai-toolkit and modelspec begins, in any case."""
    repository: str = ""
    """How the name of the base model's repository in PEFT's configuration begins, after its owner's."""
    text_width: int = 0
    """The width of the text embeddings that cross attention reads."""


def with_article(name: str) -> str:
    """Return `an SDXL`, `an Anima`, `a Z-Image`: SD and LTX are spelled out."""
    return f"{'an' if name.startswith(('SD', 'LTX', 'A', 'E', 'I')) else 'a'} {name}"


class Family(NamedTuple):
    """One architecture of base models, with the same code and the same abilities."""

    pipelines: Sequence[str]
    """The classes of diffusers that `model_index.json` of its base models names as `_class_name`."""
    abilities: Abilities
    marks: Sequence[Marks]


_BLOCK = r"(?:^|\.|lora_unet_|lora_transformer_|lycoris_)blocks[._]\d+[._]"
"""Blocks called just that: `transformer_blocks`, `double_blocks` and their like are of others."""
_IN_BLOCK = r"(?:^|[._])transformer_blocks[._]\d+[._]"
_ENDS = "(?![A-Za-z0-9])"
UNET_SAMPLERS = tuple(sampler for sampler in Sampler if sampler is not Sampler.FLOW_EULER)
_CHUNKS = range(0, 1 << 20)
"""CLIP reads a prompt of any length, chunk by chunk."""
_SDXL = Abilities(
    prompt_weights=True, rounds_down=True, samplers=UNET_SAMPLERS, text=_CHUNKS, megapixels_per_byte=80 / 1e6
)
_SD = _SDXL._replace(usual_side=512, longest_side=1024)
FAMILIES: Mapping[str, Family] = {
    "sd": Family(["StableDiffusionPipeline", "LatentConsistencyModelPipeline"], _SD, [
        Marks("SD 1", declared="sd_v1|stable-diffusion-v1", repository="stable-diffusion-v1-", text_width=768),
        Marks("SD 2", declared="sd_v2|stable-diffusion-v2", repository="stable-diffusion-2", text_width=1024),
    ]),
    "sdxl": Family(["StableDiffusionXLPipeline"], _SDXL, [
        Marks("SDXL", declared="sdxl|stable-diffusion-xl", repository="stable-diffusion-xl-", text_width=2048),
    ]),
    "flux1": Family(
        ["FluxPipeline"],
        Abilities(text=range(512, 513), megapixels_per_byte=0.0, usual=Usual(28, 3.5), usual_distilled=Usual(4, 1.0)), [
            Marks("FLUX.1", declared=r"flux([._-]?1(?!\d)|[_-]?(dev|schnell|krea|kontext))", repository=r"FLUX\.1",
                  checkpoint=r"double_blocks\.\d+\.img_mod\..+",
                  layers=r"(img|txt)_mod[._]lin\b|single_blocks[._]\d+[._]modulation[._]"
                  r"|double_blocks[._](8|9|1\d)[._]|single_transformer_blocks[._]\d+[._]"
                  r"(attn[._]to_[qkv][._]|proj_mlp|proj_out|norm[._]linear)"),
        ]),
    "flux2-klein": Family(
        ["Flux2KleinPipeline"],
        Abilities(begins_late=False, text=range(512, 513), megapixels_per_byte=0.0, usual_distilled=Usual(4, 1.0)), [
            Marks("FLUX.2", declared=r"flux\.?2", repository=r"FLUX\.2", checkpoint=r"(double|single)_stream_modulation.*",
                  layers=r"[._](to_qkv_mlp_proj|(double|single)_stream_modulation)"),
        ]),
    "z-image": Family(["ZImagePipeline"], Abilities(), [
        Marks("Z-Image", declared="z[_-]?image", repository="Z-Image", checkpoint=r"(noise|context)_refiner\..+",
              layers=r"(^|[._])(layers|(noise|context)_refiner)[._]\d+[._]"
              "(attention|feed_forward|adaLN_modulation)[._]"),
    ]),
    "krea-2": Family(["Krea2Pipeline"], Abilities(usual=Usual(28, 5.5), usual_distilled=Usual(8, 1.0)), [
        Marks("Krea 2", declared="krea[_-]?2", repository="Krea-2", checkpoint=r"txtfusion\..+",
              layers=rf"txtfusion|text_fusion|{_BLOCK}(attn[._](w[qkvo]|gate)|mlp[._](gate|up|down)){_ENDS}"
              rf"|{_IN_BLOCK}(attn[._]to_(gate|qkv)(?!_mlp)|ff[._](gate|up|down)){_ENDS}"),
    ]),
    "anima": Family(["AnimaModularPipeline"], Abilities(text=range(512, 513), megapixels_per_byte=0.0), [
        Marks("Anima", declared="anima", repository="Anima", layers="llm_adapter|text_conditioner",
              checkpoint=r"(net\.)?(llm_adapter|blocks\.\d+\.adaln_modulation_\w+)\..+"),
    ]),
    "qwen-image-2.1": Family(["QwenImage21Pipeline"], Abilities(text=range(0, 1025), usual=Usual(40, 1.0)), [
        Marks("Qwen-Image 2.1", declared="qwen[_-]image[_-]?2(?!5)", repository="Qwen-Image-2(?!5)",
              checkpoint=r"transformer_blocks\.\d+\.img_mlp\.(gate_up|gate_layer|proj|out)\..+",
              layers=rf"img_mlp[._](gate_up|gate_layer|proj|out){_ENDS}"),
    ]),
}  # fmt: skip
"""The families by name."""
OTHERS: Sequence[Marks] = (
    Marks("Anima or Cosmos", declared="cosmos", repository="Cosmos",
          layers=r"adaln_modulation_(self_attn|cross_attn|mlp)"
          rf"|{_BLOCK}((self|cross)_attn[._](q|k|v|output)_proj|mlp[._]layer[12]){_ENDS}"
          rf"|{_IN_BLOCK}norm[123][._]linear_[12]{_ENDS}"),
    Marks("Qwen-Image", declared="qwen[_-]image(?![_-]?2(?!5))", repository="Qwen-Image(?!-2(?!5))",
          layers=r"(img|txt)_mod[._]1|(img|txt)_mlp[._]net"),
    Marks("FLUX.3", declared=r"flux\.?3", repository=r"FLUX\.3",
          layers=rf"mode_blocks|ref_time_in|single_blocks[._]\d+[._](q_proj|attn_out|mlp_in){_ENDS}"),
    Marks("Chroma", declared="chroma", repository="Chroma", layers="distilled_guidance_layer",
          checkpoint=r"distilled_guidance_layer\..+"),
    Marks("HunyuanVideo or HunyuanImage", declared="hunyuan", repository="Hunyuan",
          layers=r"individual_token_refiner|context_embedder[._]token_refiner|(img|txt)_mlp[._]fc"),
    Marks("MiniMax H3", declared="minimax", repository="MiniMax-H3", layers=r"token_refiner[._](refiner_)?blocks"),
    Marks("HiDream", declared="hidream", repository="HiDream", layers="(double|single)_stream_blocks"),
    Marks("AuraFlow", declared="auraflow", repository="AuraFlow", layers="double_layers|joint_transformer_blocks"),
    Marks("SD 3", declared="sd3|stable-diffusion-3", repository="stable-diffusion-3", checkpoint=r"joint_blocks\..+",
          layers="joint_blocks"),
    Marks("Lumina 2", declared="lumina", repository="Lumina",
          layers=rf"(layers|_refiner)[._]\d+[._](attn[._]to_|feed_forward[._]linear_[123]{_ENDS})"),
    Marks("Ideogram 4", declared="ideogram", repository="ideogram",
          layers=rf"layers[._]\d+[._](attention[._]o{_ENDS}|adaln_modulation)|final_layer[._]adaln_modulation"),
    Marks("Bria FIBO 2", declared="fibo", repository="FIBO", layers="perceiver[._]layers"),
    Marks("ERNIE-Image", declared="ernie[_-]image", repository="ERNIE-Image",
          layers=r"layers[._]\d+[._]self_attention"),
    Marks("LTX-2", declared="ltx[a-z]*[_-]?2", repository="LTX-2", layers="av_ca_|av_cross_attn|audio_"),
    Marks("LTX", declared="ltx", repository="LTX", layers="patchify_proj"),
    Marks("Sana", declared="sana", repository="Sana", layers="q_linear|kv_linear|ff[._]conv_(inverted|point)"),
    Marks("Wan", declared="wan", repository="Wan",
          layers=rf"{_BLOCK}((self|cross)_attn[._][qkvo]{_ENDS}|ffn[._]|attn[12][._]to_)"),
    Marks("SDXL refiner", text_width=1280),
)  # fmt: skip
"""Architectures without a family here, whose files are refused by name; where a file has marks of several, the first
of them is named."""
FLUX = Marks("Flux", declared="flux", repository="FLUX",
             layers=r"(^|[._])(double_blocks|single_blocks|single_transformer_blocks)[._]")  # fmt: skip
"""What several architectures have, of which sizes may tell one."""
MARKS = (*OTHERS, *(marks for family in FAMILIES.values() for marks in family.marks), FLUX)
"""The more particular ones come first."""

BY_PIPELINE = {pipeline: family.abilities for family in FAMILIES.values() for pipeline in family.pipelines}
UNKNOWN = _SD._replace(longest_side=1536, rounds_down=False, samplers=tuple(Sampler))
"""The abilities of a base model whose folder cannot be read here: its engine refuses by name what it cannot do."""


def family_of(pipeline: str) -> str:
    """Return the family of a pipeline class of diffusers; '' where it has none here."""
    return next((name for name, family in FAMILIES.items() if pipeline in family.pipelines), "")


def abilities_of(pipeline: str) -> Abilities:
    """Return the abilities of a pipeline class of diffusers; '' is unknown."""
    return BY_PIPELINE.get(pipeline, UNKNOWN)


REFERENCE_PIXELS, REFERENCE_STEP = 1024 * 1024, 16
"""A picture that a model looks at as a whole is reduced to this many pixels, and cut to multiples of 16 a side."""
LEAST_REFERENCE_SIDE, LONGEST_REFERENCE = 64, 8
"""Its shorter side has at least this many pixels, and its longer one is at most this many times as long; these are the
bounds of diffusers' `Flux2ImageProcessor`."""


def reference_size(width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of such a picture after it is reduced, and of what of its middle is looked at."""
    scale = min(1.0, math.sqrt(REFERENCE_PIXELS / (width * height)))
    reduced = int(width * scale), int(height * scale)
    across, down = (max(REFERENCE_STEP, side // REFERENCE_STEP * REFERENCE_STEP) for side in reduced)
    return reduced, (across, down)
