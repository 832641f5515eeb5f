"""Chooses fields of a file's training metadata, cuts them, and suggests trigger words."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

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
"""Fields of the model metadata standard (modelspec), of sd-scripts' `train_network.py`, and one of PEFT's configuration."""
MAX_VALUE = 200
"""Characters of a value; a thumbnail or a data set's captions are no value."""
MAX_SUGGESTED, MAX_WORD = 5, 64
"""Suggested trigger words, and the characters of each: an account may set words of this length."""
TAGS = "ss_tag_frequency"


def training_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The fields that say something, as one line of printable text each."""
    values = {name: _line(metadata[name])[:MAX_VALUE].rstrip() for name in KEPT if name in metadata}
    return {name: value for name, value in values.items() if value not in ("", "None")}


def suggested_trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """The phrase that the file names, then the tags that most of its training images had."""
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
    for tags in _objects(_values(folders)):
        for tag, count in tags.items():
            if type(count) is int and len(tag) <= MAX_WORD:
                counts[tag] += count
    return counts


def _values(document: Any) -> Iterable[Any]:
    return cast(Mapping[str, Any], document).values() if isinstance(document, dict) else ()


def _objects(values: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    return (cast(Mapping[str, Any], value) for value in values if isinstance(value, dict))


def _line(text: str) -> str:
    """Remove line breaks, control characters and lone surrogates, which a log or database refuses."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_VALUE]).split())
