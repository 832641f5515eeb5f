"""Checks a customer's adapter against a base model, in a process of limited memory and time.

`python -m serve_app.engine.inspection FOLDER BASE PATH MAX_RANK KEPT SECONDS` prints one line of JSON: {"found": …} or
{"refused": reason}. The base model is known by its layer table, which the folder `KEPT` holds from the second time on.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from serve_app.engine import loading
from serve_app.engine.adapters.explain import also_fits, base_family
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.placing import Placed, place
from serve_app.engine.adapters.source import Source, open_source
from serve_app.engine.families.outlines import outlined_table
from serve_app.safetensors_file import limited

if TYPE_CHECKING:
    from serve_app.engine.adapters.reader import AdapterWeights

KEPT: Sequence[str] = (
    *(f"modelspec.{field}" for field in (
        "title", "architecture", "implementation", "author", "date", "description", "trigger_phrase", "usage_hint",
        "tags", "license", "resolution", "prediction_type",
    )),
    *(f"ss_{field}" for field in (
        "output_name", "base_model_version", "sd_model_name", "network_module", "network_dim", "network_alpha",
        "num_train_images", "steps", "max_train_steps", "epoch", "num_epochs", "learning_rate", "unet_lr",
        "text_encoder_lr", "optimizer", "lr_scheduler", "resolution", "clip_skip", "mixed_precision", "seed",
        "training_started_at", "training_comment",
    )),
    "base_model_name_or_path",
)  # fmt: skip
"""These fields are read: of the model metadata standard (modelspec), of sd-scripts' `train_network.py`, one of PEFT's
configuration."""
MAX_VALUE = 200
"""A value has at most this many characters: a thumbnail or a data set's captions are left out."""
MAX_SUGGESTED, MAX_WORD = 5, 64
"""At most this many trigger words are suggested, of at most this many characters, as long as an account may set
them."""
TAGS = "ss_tag_frequency"


def training_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that say something, as one line of printable text each."""
    values = {name: _line(metadata[name])[:MAX_VALUE].rstrip() for name in KEPT if name in metadata}
    return {name: value for name, value in values.items() if value not in ("", "None")}


def suggested_trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """Return the phrase that the file names, then the tags that most of its training images had."""
    named = _line(metadata.get("modelspec.trigger_phrase", "")[: MAX_SUGGESTED * MAX_WORD]).split(",")
    tags = (_line(tag) for tag, _ in _tag_counts(metadata.get(TAGS, "")).most_common(MAX_SUGGESTED))
    words = dict.fromkeys(word for word in map(str.strip, (*named, *tags)) if 0 < len(word) <= MAX_WORD)
    return [*words][:MAX_SUGGESTED]


def _tag_counts(text: str) -> Counter[str]:
    """Count tags over all folders of the data set, as sd-scripts writes: `{"3_ink": {"a cat": 1}}`."""
    try:
        folders = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return Counter()
    counts = Counter[str]()
    for tags in map(_object, _object(folders).values()):
        for tag, count in tags.items():
            if type(count) is int and len(tag) <= MAX_WORD:
                counts[tag] += count
    return counts


def _object(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, and nothing in place of any other value."""
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}


def _line(text: str) -> str:
    """Remove line breaks, control characters and lone surrogates, which a log or database refuses."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_VALUE]).split())


MEMORY = 2 << 30
"""Reading an adapter may take this many bytes beyond what the libraries take."""
PATTERN_SECONDS = 0.5
"""Comparing PEFT's `alpha_pattern` with all layers may take this long: a replica does it again, and can do nothing else
meanwhile."""
WRITERS: Mapping[str, str] = {"ss_": "sd-scripts", "ot_": "OneTrainer", "lora_adapter_metadata": "diffusers"}
"""Prefix of a metadata key → program that wrote the file."""


def main(folder: str, base: str, path: str, max_rank: str, kept: str, seconds: str) -> None:
    """`folder` describes the base model `base`; each of two reads may take `seconds` of processor time."""
    table = outlined_table(Path(folder), Path(kept), name=base)
    limits = partial(limited, MEMORY, float(seconds))
    sys.stdout.write(json.dumps(inspect_adapter(Path(path), table, base, int(max_rank), limits=limits)) + "\n")


def inspect_adapter(
    path: Path,
    table: LayerTable,
    base: str,
    max_rank: int,
    *,
    limits: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """{"found": what the file holds} or {"refused": the reason}; `base` is the base model's id.

    `limits` hold for each of the two times that the file is read: its names, by which an unfit one is refused before
    torch is loaded, which takes 2 s; and then its numbers.
    """
    try:
        with limits():
            placed = place(open_source(path), table, pattern_seconds=PATTERN_SECONDS)
        with loading():
            import torch

            from serve_app.engine.adapters.reader import read_placed

        with limits():
            weights = read_placed(placed, table, max_rank=max_rank, dtype=torch.float16)
            return {"found": _describe(weights, placed, table, base)}
    except UnusableAdapter as error:
        return {"refused": str(error)}
    except BaseException as error:
        if not _is_out_of_memory(error):
            raise
        return {"refused": "the file takes too much memory to read"}


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python and torch raise errors of their own, and safetensors panics."""
    return isinstance(error, MemoryError) or "memory" in str(error) or type(error).__name__ == "PanicException"


def _describe(weights: "AdapterWeights", placed: Placed, table: LayerTable, base: str) -> dict[str, Any]:
    """Return what the file holds, in fields and in a sentence, and what its metadata say of its training."""
    source = placed.source
    layers = [made for layers in weights.values() for made in layers.values()]
    rank, work_rank = max(made.size_rank for made in layers), max(made.work_rank for made in layers)
    kinds = sorted({_kind(layer, made.down.dim()) for layer, made in weights.get(table.denoiser, {}).items()})
    encoders = [name.replace("_", " ") for name in sorted(weights) if name != table.denoiser]
    family = base_family(table) or base
    others = _joined(also_fits(source.shapes, table, source.declared))
    algorithm, writer = placed.algorithm, _writer(source)
    parts = [
        family,
        "" if algorithm == "LoRA" else algorithm,
        f"as large as rank {rank}" if any(made.factors for made in layers) else f"rank {rank}",
        _joined(kinds),
        _joined(encoders),
        f"from {writer}" if writer else "",
    ]
    return {
        "summary": ", ".join(part for part in parts if part) + (f"; it fits {others} as well" if others else ""),
        "family": family,
        "algorithm": algorithm,
        "rank": rank,
        "work_rank": work_rank,
        "factored": _digest_of_factored(weights),
        "layers": len(layers),
        "targets": kinds,
        "components": sorted(weights),
        "writer": writer,
        "metadata": training_metadata(source.declared),
        "suggested_trigger_words": suggested_trigger_words(source.metadata),
    }


def _digest_of_factored(weights: "AdapterWeights") -> str:
    """Return a digest of the layers that a LoKr applies by whole factors: two with the same one cannot be added."""
    names = [
        f"{component}.{layer}" for component in weights for layer, made in weights[component].items() if made.factors
    ]
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16] if names else ""


def _kind(layer: str, dimensions: int) -> str:
    if ".attn" in layer or ".attention." in layer:
        return "attention"
    if ".ff." in layer or ".ff_context." in layer or ".feed_forward." in layer:
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
