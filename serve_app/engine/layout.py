"""Lays out every layer's part of an adapter in one flat row: all downs first, then all ups."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from serve_app.engine.lora_layers import LoRALayer
from serve_app.engine_options import MAX_RANK

RANK_BUCKETS = (8, 16, 32, 64, 128, MAX_RANK)
"""A batch's highest rank is rounded up to one of these: lower ranks are computed beside it, padded with zeros."""
LEAST_SUMMED = 16
"""Ups, over whose rank a sum runs, are padded to this rank: from here on zeros leave a sum's bits alone (measured on CPU; at
8 they do not), so that ranks may mix in exact mode."""


class Layout(NamedTuple):
    """Offsets by layer, every layer at the same rank.

    Never changed, only replaced by one of the next version.
    """

    version: int
    rank: int
    downs: dict[str, int]
    ups: dict[str, int]
    size: int

    @classmethod
    def over(cls, layers: Mapping[str, LoRALayer], names: Iterable[str], rank: int, *, version: int) -> "Layout":
        """The layout of the named `layers`, in the layers' own order."""
        wanted = set(names)
        chosen = [name for name in layers if name in wanted]
        ends = [0]
        downs = [layers[name].fan_in * rank for name in chosen]
        for length in downs + [layers[name].fan_out * summed_rank(rank) for name in chosen]:
            ends.append(ends[-1] + length)
        starts = dict(zip(chosen, ends, strict=False)), dict(zip(chosen, ends[len(chosen) :], strict=False))
        return cls(version, rank, *starts, ends[-1])

    def covers(self, ranks: Mapping[str, int]) -> bool:
        return all(name in self.downs and rank <= self.rank for name, rank in ranks.items())

    @property
    def ups_start(self) -> int:
        return min(self.ups.values(), default=self.size)

    def views(self, name: str, layer: LoRALayer, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return a layer's down and up in flat rows, cut to `rank`: rank is first, so a lower one is a prefix."""
        down, up, summed = self.downs[name], self.ups[name], summed_rank(rank)
        return (
            layer.view_down(rows[:, down : down + layer.fan_in * rank], rank),
            layer.view_up(rows[:, up : up + layer.fan_out * summed], summed),
        )


def summed_rank(rank: int) -> int:
    return max(rank, LEAST_SUMMED)


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in RANK_BUCKETS if bucket >= rank)
