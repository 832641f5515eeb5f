"""Layer names of the original Stable Diffusion code (SGM), which many SDXL LoRA files still use."""

import re
from collections.abc import Iterable

RESNET_PARTS = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
TOP_LAYERS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_BLOCK = re.compile(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")


def sgm_aliases(layers: Iterable[str], layers_per_block: int | list[int]) -> dict[str, str]:
    """Map SGM names to our names for every layer that has one."""
    if not isinstance(layers_per_block, int):
        if len(set(layers_per_block)) != 1:
            return {}
        layers_per_block = layers_per_block[0]
    names = list(layers)
    cross = {
        match[2]
        for name in names
        if (match := _BLOCK.match(name)) and match[1] == "up_blocks" and match[3] == "attentions"
    }
    aliases = {_sgm_name(name, layers_per_block, cross): name for name in names}
    aliases.pop("", None)
    return aliases


def _sgm_name(name: str, depth: int, up_blocks_with_attention: set[str]) -> str:
    if name in TOP_LAYERS:
        return TOP_LAYERS[name]
    if match := _MIDDLE.match(name):
        kind, index, rest = match.groups()
        return (
            f"middle_block.1.{rest}" if kind == "attentions" else f"middle_block.{2 * int(index)}.{_resnet_part(rest)}"
        )
    if not (match := _BLOCK.match(name)):
        return ""
    side, block, kind, index, rest = match.groups()
    first = int(block) * (depth + 1)
    where = f"input_blocks.{1 + first + int(index)}" if side == "down_blocks" else f"output_blocks.{first + int(index)}"
    match kind:
        case "resnets":
            return f"{where}.0.{_resnet_part(rest)}"
        case "attentions":
            return f"{where}.1.{rest}"
        case "downsamplers":
            return f"input_blocks.{1 + first + depth}.0.op"
        case _:
            return f"output_blocks.{first + depth}.{2 if block in up_blocks_with_attention else 1}.conv"


def _resnet_part(rest: str) -> str:
    return RESNET_PARTS.get(rest, rest)
