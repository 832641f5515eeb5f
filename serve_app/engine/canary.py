"""Draws one fixed request before a base model is ready, and tells when it is not drawn as it was.

The pass has a fixed prompt and seed, the rows of one image and random adapters on every layer. Digests of the encoded
prompt, of the pass and of a decoded picture are kept with the versions that made them. They are compared under the same
weights, card, number types and options alone, so a difference is an update's doing, or a card's.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.domain.canary import FOLDER, Drawing, difference
from serve_app.engine.findings import Shelf

SAMPLED = 1024
"""Numbers of each weight that tell checkpoints of one structure apart."""
log = logging.getLogger(__name__)


def look(
    name: str,
    modules: Iterable[nn.Module],
    circumstances: Mapping[str, Any],
    told: Sequence[object],
    drew: Mapping[str, Sequence[Tensor | np.ndarray]],
    shelf: Shelf,
) -> str:
    """Compare what was drawn with what is kept, keep it, and say the difference, '' where there is none.

    `told` is what was said of the base model and changes its pictures; `drew` has numbers by part.
    """
    hardware, options, versions = _divided(circumstances)
    key = _digest(hardware, options, *told, *map(_sample, modules))
    now = Drawing(
        model=name,
        hardware=hardware[0],
        key=key,
        versions=versions,
        drew={part: _digest(*map(_bytes, numbers)) for part, numbers in drew.items()},
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        kept = Drawing.read(shelf.read(FOLDER))
        if not any(each.key == key and each.versions == versions for each in kept):
            shelf.write(FOLDER, f"{key[:24]}-{_digest(versions)[:24]}.json", now.written())
    except OSError as error:
        log.warning("what %s drew before cannot be read: %s", name, error)
        return ""
    if changed := difference(now, kept):
        log.warning("%s; see docs/understand/same-bytes.md", changed)
    return changed


def _divided(circumstances: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[object], dict[str, str]]:
    """Return the hardware without its driver, the options, and the versions of everything that an update changes.

    Which kernels run is no option, and what code calls a model's parts is nothing to compare by.
    """
    *options, _by_kernel = circumstances["options"]
    versions = dict(circumstances["versions"])
    versions |= {name: _digest(circumstances[name])[:8] for name in ("settings", "kernels", "build")}
    versions |= {"engine": circumstances["engine"][:8], "attention": circumstances["attention"]}
    hardware = circumstances["hardware"]
    if isinstance(hardware, str):
        return [f"a CPU ({hardware[:8]})"], options, versions
    card, sizes, versions["driver"], versions["cuDNN"] = hardware
    return [card, sizes], options, versions


def _sample(module: nn.Module) -> str:
    """Return a digest of some numbers of every weight, whatever the weights are called."""
    flats = (tensor.detach().flatten() for tensor in module.state_dict().values())
    return _digest(*sorted(_digest(_bytes(flat[:: max(1, len(flat) // SAMPLED)])) for flat in flats))


def _bytes(numbers: Tensor | np.ndarray) -> bytes:
    if isinstance(numbers, np.ndarray):
        return numbers.tobytes()
    return numbers.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()
