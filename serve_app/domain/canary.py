"""Compares what a base model draws for one fixed request under several versions: an update may change every picture.

A worker draws it before it is ready (`engine/canary.py`); what it drew is kept in the storage, a file for each model,
card and set of versions.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Self

FOLDER = "canary"


class Drawing(NamedTuple):
    """What was drawn, by what."""

    model: str
    hardware: str
    key: str
    """Digest of all that is the same before and after an update: weights, card, options."""
    versions: Mapping[str, str]
    drew: Mapping[str, str]
    """Digests of the encoded prompt, of a pass of the denoiser and of the decoded picture, by part."""
    at: str
    """When these versions first drew it, in ISO 8601."""

    @classmethod
    def read(cls, files: Mapping[str, bytes]) -> list[Self]:
        """Return the drawings that files hold, but for files that are damaged."""
        found: list[Self] = []
        for content in files.values():
            with suppress(ValueError, TypeError):
                found.append(cls(**json.loads(content)))
        return found

    def written(self) -> bytes:
        return json.dumps(self._asdict(), indent=1).encode()


def difference(now: Drawing, kept: Iterable[Drawing]) -> str:
    """Say in which parts a drawing is not that of the versions before, and what has changed since; '' where it is."""
    alike = [each for each in kept if each.key == now.key]
    again = [each for each in alike if each.versions == now.versions and each.drew != now.drew]
    others = sorted((each for each in alike if each.versions != now.versions), key=lambda each: each.at)
    before = again[0] if again else others[-1] if others else now
    parts = [part for part, digest in now.drew.items() if before.drew.get(part) != digest]
    if not parts:
        return ""
    told = f"{now.model} on {now.hardware} does not draw what it drew before ({', '.join(parts)})"
    if again:
        return f"{told}, and no version has changed since {before.at}: the hardware may be faulty"
    changed = (
        f"{name} {before.versions.get(name) or 'none'} → {now.versions.get(name) or 'none'}"
        for name in {**before.versions, **now.versions}
        if before.versions.get(name) != now.versions.get(name)
    )
    return f"{told} with {', '.join(changed)}"


def latest_differences(kept: Iterable[Drawing]) -> list[str]:
    """Say for each model and card how the newest drawing differs from the one before it, if it does."""
    newest: dict[str, Drawing] = {}
    drawings = sorted(kept, key=lambda each: each.at)
    for each in drawings:
        newest[each.key] = each
    return [told for each in newest.values() if (told := difference(each, drawings))]
