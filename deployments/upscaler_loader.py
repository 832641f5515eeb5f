"""Loads the upscaler of a replica. Apart from the deployment, so that describing one loads no torch."""

import torch

from deployments.args import UpscalerArgs
from deployments.device import prepare_device
from serve_app.settings import ROOT
from serve_app.upscale.upscaler import Upscaler


def load_upscaler(args: UpscalerArgs) -> Upscaler:
    prepare_device(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Upscaler.load(ROOT / args.weights if args.weights else None, device=device)
