"""Compilation of a denoiser by torch.compile."""

from typing import Any

import torch
from torch import nn

GRAPHS = 1024
"""Compiled forward shapes that are kept: batch keys (latent shape, prompt length) times row counts."""


def compile_denoiser(module: nn.Module, backend: str) -> Any:
    """Compile one graph per forward shape.

    By default torch keeps eight, then runs eagerly and only logs it.
    """
    limits = torch._dynamo.config  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, GRAPHS)
    return torch.compile(module, backend=backend, dynamic=False)
