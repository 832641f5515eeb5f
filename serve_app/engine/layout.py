"""Where each layer's part of an adapter lies in one flat row of numbers: all downs first, then all ups."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from serve_app.engine.layers import SlotLayer

RANK_BUCKETS = (16, 32, 64, 128, 256)
"""From 16 up a sum padded with zeros keeps its bits (measured on CPU; 8 differs), so ranks may mix in exact mode."""


class Layout(NamedTuple):
    """Offsets by layer, every layer at the same rank. Never changed, only replaced by one of the next version."""

    version: int
    rank: int
    downs: dict[str, int]
    ups: dict[str, int]
    size: int

    @classmethod
    def over(cls, layers: Mapping[str, SlotLayer], names: Iterable[str], rank: int, *, version: int) -> "Layout":
        """Of those `layers` that `names` names, in the layers' own order."""
        wanted = set(names)
        chosen = [name for name in layers if name in wanted]
        ends = [0]
        for fan in [layers[name].fan_in for name in chosen] + [layers[name].fan_out for name in chosen]:
            ends.append(ends[-1] + fan * rank)
        downs, ups = dict(zip(chosen, ends, strict=False)), dict(zip(chosen, ends[len(chosen) :], strict=False))
        return cls(version, rank, downs, ups, ends[-1])

    def covers(self, ranks: Mapping[str, int]) -> bool:
        return all(name in self.downs and rank <= self.rank for name, rank in ranks.items())

    @property
    def ups_start(self) -> int:
        return min(self.ups.values(), default=self.size)

    def views(self, name: str, layer: SlotLayer, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """A layer's down and up in flat rows, narrowed to `rank`: rank comes first in both, so a lower one is a prefix."""
        down, up = self.downs[name], self.ups[name]
        return (
            layer.view_down(rows[:, down : down + layer.fan_in * rank], rank),
            layer.view_up(rows[:, up : up + layer.fan_out * rank], rank),
        )


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in RANK_BUCKETS if bucket >= rank)
