"""Writes this folder's files with musubi-tuner itself, which no package index has.

    git clone https://github.com/kohya-ss/musubi-tuner /tmp/musubi-tuner
    git -C /tmp/musubi-tuner checkout 30c658c4f4b0bf05038b3346eff9670259b10fc7
    python -m tests.engine.musubi_tuner.recipe /tmp/musubi-tuner

Its `networks/lora_zimage.py` and `networks/loha.py` name the layers of the tiny transformer, hold the weights and save
them; its `networks/convert_z_image_lora_to_comfy.py` makes the file for ComfyUI of each. None depends on the
transformer's own weights.
"""

import importlib
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from tests.engine.tiny_models import diffusers
from tests.engine.tiny_z_image import write_z_image

FOLDER = Path(__file__).parent
ALPHA = 1.0


def main(musubi_tuner: Path) -> None:
    sys.path.insert(0, str(musubi_tuner / "src"))
    networks: Any = "musubi_tuner.networks."
    convert = importlib.import_module(networks + "convert_z_image_lora_to_comfy")
    with tempfile.TemporaryDirectory() as folder:
        path = write_z_image(Path(folder)) / "transformer"
        transformer = diffusers.ZImageTransformer2DModel.from_pretrained(path)
    for kind, module, dim in (("lora", "lora_zimage", 2), ("loha", "loha", 1)):
        network = importlib.import_module(networks + module).create_arch_network(1.0, dim, ALPHA, None, [], transformer)
        network.apply_to([], transformer, apply_text_encoder=False, apply_unet=True)
        generator = torch.Generator().manual_seed(3)
        for parameter in network.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        plain, converted = FOLDER / f"{kind}.safetensors", FOLDER / f"{kind}_comfy.safetensors"
        network.save_weights(str(plain), torch.float32, {"ss_base_model_version": "z_image"})
        convert.main(Namespace(src_path=str(plain), dst_path=str(converted), reverse=False, lokr_rank=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
