"""Device and number type that the engine computes with."""

import torch

from serve_app.engine_options import EngineOptions


def torch_device(options: EngineOptions) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_dtype(options: EngineOptions) -> torch.dtype:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if torch_device(options).type == "cpu" else torch.bfloat16
