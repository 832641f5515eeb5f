"""Checks a customer's adapter against a base model, in a process of limited memory and time.

`python -m serve_app.engine.inspection FOLDER BASE PATH MAX_RANK KEPT SECONDS` prints one line of JSON: {"found": …} or
{"refused": reason}. The base model is known by its layer table, which the folder `KEPT` holds from the second time on.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.adapters import AdapterWeights, UnusableAdapter
from serve_app.engine.adapters.explain import FAMILIES, base_name
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.adapters.reader import read_source
from serve_app.engine.adapters.source import Source, open_source
from serve_app.engine.adapters.tensor_names import algorithm_of
from serve_app.engine.adapters.training import suggested_trigger_words, training_metadata
from serve_app.engine.layer_outline import outlined_table
from serve_app.process_limits import limit_memory, limit_processor_time

MEMORY = 2 << 30
"""Bytes that reading an adapter may take beyond what the libraries take."""
PATTERN_SECONDS = 0.5
"""For comparing PEFT's `alpha_pattern` with all layers: a replica does it again, and nothing else meanwhile."""
WRITERS: Mapping[str, str] = {"ss_": "sd-scripts", "ot_": "OneTrainer", "lora_adapter_metadata": "diffusers"}
"""Writer by how its metadata begin."""


def main(folder: str, base: str, path: str, max_rank: str, kept: str, seconds: str) -> None:
    """`folder` describes the base model `base`; reading the file may take `seconds` of processor time."""
    table = outlined_table(Path(folder), Path(kept), name=base)
    torch.set_num_threads(1)
    limit_memory(MEMORY)
    limit_processor_time(int(seconds))
    print(json.dumps(inspect_adapter(Path(path), table, base, int(max_rank))))  # noqa: T201 - read by the process that started this one


def inspect_adapter(path: Path, table: LayerTable, base: str, max_rank: int) -> dict[str, Any]:
    """{"found": what the file holds} or {"refused": the reason}; `base` is the base model's id."""
    try:
        source = open_source(path)
        weights = read_source(source, table, max_rank=max_rank, dtype=torch.float16, pattern_seconds=PATTERN_SECONDS)
        return {"found": _describe(weights, source, table, base)}
    except UnusableAdapter as error:
        return {"refused": str(error)}
    except BaseException as error:
        if not _is_out_of_memory(error):
            raise
        return {"refused": "the file takes too much memory to read"}


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, torch's, or that of safetensors, which panics."""
    return isinstance(error, MemoryError) or "memory" in str(error) or type(error).__name__ == "PanicException"


def _describe(weights: AdapterWeights, source: Source, table: LayerTable, base: str) -> dict[str, Any]:
    """What the file holds, in fields and in a sentence, and what its metadata say of its training."""
    ranks = [made.down.shape[0] for layers in weights.values() for made in layers.values()]
    kinds = sorted({_kind(layer, made.down.dim()) for layer, made in weights.get(table.denoiser, {}).items()})
    encoders = [name.replace("_", " ") for name in sorted(weights) if name != table.denoiser]
    family = base_name(table) if base_name(table) in FAMILIES.values() else base
    algorithm, writer = algorithm_of(source.header.tensors), _writer(source)
    parts = [
        family,
        "" if algorithm == "LoRA" else algorithm,
        f"rank {max(ranks)}",
        _joined(kinds),
        _joined(encoders),
        f"from {writer}" if writer else "",
    ]
    return {
        "summary": ", ".join(part for part in parts if part),
        "family": family,
        "algorithm": algorithm,
        "rank": max(ranks),
        "layers": len(ranks),
        "targets": kinds,
        "components": sorted(weights),
        "writer": writer,
        "metadata": training_metadata(source.declared),
        "suggested_trigger_words": suggested_trigger_words(source.metadata),
    }


def _kind(layer: str, dimensions: int) -> str:
    if ".attn" in layer:
        return "attention"
    if ".ff." in layer:
        return "feed-forward"
    return "convolution" if dimensions > 2 else "linear"


def _joined(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _writer(source: Source) -> str:
    """Who wrote the file, by its metadata; empty where they do not say."""
    if source.peft_config is not None:
        return "PEFT"
    named = (name for start, name in WRITERS.items() if any(key.startswith(start) for key in source.metadata))
    return next(named, "diffusers" if source.is_folder else "")


if __name__ == "__main__":
    main(*sys.argv[1:])
