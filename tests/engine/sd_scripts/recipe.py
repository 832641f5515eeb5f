"""Writes this folder's files with sd-scripts itself, which no package index has.

    git clone https://github.com/kohya-ss/sd-scripts /tmp/sd-scripts
    git -C /tmp/sd-scripts checkout 48d368fa557731ad0488c07304dfeba8c07910eb
    python -m tests.engine.sd_scripts.recipe /tmp/sd-scripts

It wants OpenCV to train. Its `networks/lora.py` names the layers, holds the weights, draws with them in place and saves
them; two modules for logging and hashing are left out. The base models are the random ones of `tiny_models`, as the
tests write them. The latents of the base and those at each weight are written next to each file: whoever changes
what `tiny_models` or diffusers draw without an adapter writes them again.
"""

import hashlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save, save_file
from torch import nn

from tests.engine import tiny_models
from tests.engine.latent_comparison import EVERY_WEIGHT, Base

FOLDER = Path(__file__).parent
TRAINING = {
    "ss_output_name": "ink", "ss_network_module": "networks.lora", "ss_mixed_precision": "no", "ss_v2": "False",
    "ss_sd_model_name": "tiny", "ss_resolution": "(32, 32)", "ss_steps": "10", "ss_num_train_images": "3",
    "ss_clip_skip": "None",
    "ss_tag_frequency": '{"3_ink": {"ink drawing": 3, "a cat": 1}}',
    "ss_dataset_dirs": '{"3_ink": {"n_repeats": 3, "img_count": 3}}',
}  # fmt: skip
"""A part of what `train_network.py` notes; all of it is text."""


class Fixture(NamedTuple):
    base: str
    version: str
    dim: int
    alpha: float
    dtype: torch.dtype | None = None
    options: Mapping[str, str] = {}


FIXTURES = {
    "sd_defaults": Fixture(
        "sd", "sd_v1", 1, 1
    ),  # `--network_alpha` left out is the integer 1, and stays one in the file
    "sdxl_fp16": Fixture("sdxl", "sdxl_base_v1-0", 1, 0.5, torch.float16),
    "sd_convolutions": Fixture("sd", "sd_v1", 2, 1.0, torch.bfloat16, {"conv_dim": "1", "conv_alpha": "0.5"}),
}
"""The one with convolutions is last: sd-scripts goes on to train them for the rest of its process."""


def main(sd_scripts: Path) -> None:
    lora = _networks_lora(sd_scripts)
    for name, fixture in FIXTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            base = Base(fixture.base, getattr(tiny_models, f"write_{fixture.base}")(Path(folder) / "model"))
            _write(FOLDER / f"{name}.safetensors", fixture, base, lora)


def _write(path: Path, fixture: Fixture, base: Base, lora: Any) -> None:
    encoders = [_text_shell(module) for part, module in base.components.items() if part != "unet"]
    unet = base.components["unet"] if fixture.base == "sd" else _sdxl_shell(base.components["unet"])
    network = lora.create_network(1.0, fixture.dim, fixture.alpha, None, encoders, unet, **fixture.options)
    network.apply_to(encoders, unet)
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = parameter.data.to(fixture.dtype or torch.float32).float()  # what is saved is what draws
    latents = {"base": base.plain}
    with torch.no_grad():
        for weight in EVERY_WEIGHT:
            network.set_multiplier(weight)
            latents[f"{weight}"] = base.latents().clone()
    notes = {
        "ss_base_model_version": fixture.version, "ss_network_dim": f"{fixture.dim}",
        "ss_network_alpha": f"{fixture.alpha}",
    }  # fmt: skip
    network.save_weights(str(path), fixture.dtype, TRAINING | notes)
    save_file(latents, path.with_suffix(".latents"))


def _networks_lora(sd_scripts: Path) -> Any:
    """sd-scripts' module, without the two of its modules that need OpenCV."""
    logs, training = ModuleType("library.utils"), ModuleType("library.train_util")
    logs.__dict__["setup_logging"] = lambda *_args, **_options: None
    training.__dict__["precalculate_safetensors_hashes"] = _hashes
    sys.modules |= {"library.utils": logs, "library.train_util": training}
    sys.path.insert(0, str(sd_scripts))
    import networks.lora  # pyright: ignore[reportMissingImports]

    return networks.lora


def _hashes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[str, str]:
    digest = hashlib.sha256(save(dict(tensors), dict(metadata))).hexdigest()
    return digest, digest[:8]


def _text_shell(encoder: nn.Module) -> nn.Module:
    """Put the encoder's layers below `text_model`, where sd-scripts' version of transformers has them."""
    if hasattr(encoder, "text_model"):
        return encoder
    shell = nn.Module()
    shell.add_module("text_model", encoder)
    return shell


def _sdxl_shell(unet: nn.Module) -> nn.Module:
    """Put diffusers' own transformers where sd-scripts' UNet of SDXL has them.

    It has that UNet's names, and latents that diffusers draws. sd-scripts' UNet has the sizes of SDXL written into it,
    and none of its own is needed for a LoRA of attention.
    """
    from library.sdxl_original_unet import SdxlUNet2DConditionModel  # pyright: ignore[reportMissingImports]

    shell = SdxlUNet2DConditionModel.__new__(SdxlUNet2DConditionModel)
    nn.Module.__init__(shell)
    for place, layer in {
        "input_blocks.4.1": "down_blocks.1.attentions.0",
        "input_blocks.5.1": "down_blocks.1.attentions.1",
        "middle_block.1": "mid_block.attentions.0",
        "output_blocks.0.1": "up_blocks.0.attentions.0",
        "output_blocks.1.1": "up_blocks.0.attentions.1",
        "output_blocks.2.1": "up_blocks.0.attentions.2",
    }.items():
        *parents, last = place.split(".")
        container: nn.Module = shell
        for parent in parents:
            if not hasattr(container, parent):
                container.add_module(parent, nn.Module())
            container = container.get_submodule(parent)
        container.add_module(last, unet.get_submodule(layer))
    return shell


if __name__ == "__main__":
    main(Path(sys.argv[1]))
