"""Memory of the card that an executor computes on."""

from collections.abc import Mapping

from serve_app.domain import metrics
from serve_app.domain.metrics import Metric


def memory_of(device: object) -> Mapping[Metric, float]:
    """In use and in all, of a device by its name; empty without a card."""
    if not str(device).startswith("cuda"):
        return {}
    import torch  # an upscaler is described without it

    free, total = torch.cuda.mem_get_info(str(device))
    return {metrics.GPU_MEMORY: total, metrics.GPU_MEMORY_USED: total - free}
