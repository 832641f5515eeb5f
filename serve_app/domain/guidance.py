"""Guidance over a part of an image's steps: which steps have it, and who says so."""

from typing import NamedTuple, Protocol, Self

FIELDS = ("guidance_start", "guidance_end")


class SaysPart(Protocol):
    """A draft, a request, a LoRA or a base model: None in both fields leaves the part to others."""

    @property
    def guidance_start(self) -> float | None: ...
    @property
    def guidance_end(self) -> float | None: ...


class GuidancePart(NamedTuple):
    """The fractions of its own steps between which an image has guidance."""

    start: float = 0.0
    end: float = 1.0

    @classmethod
    def said_by(cls, *asked: SaysPart) -> Self | None:
        """Return the part of the first that says one, or None; whoever names one end alone means the other as well.

        Raises ValueError where the start is not before the end, or one of them is no fraction.
        """
        for each in asked:
            start, end = each.guidance_start, each.guidance_end
            if start is None and end is None:
                continue
            part = cls(start or 0.0, 1.0 if end is None else end)
            if not 0 <= part.start < part.end <= 1:
                order = "start: must be below guidance_end" if end is None else "end: must be above guidance_start"
                raise ValueError(f"guidance_{order}, both from 0 to 1, not {part.start:g} and {part.end:g}")
            return part
        return None

    def steps(self, of: int) -> range:
        """Return the steps that have guidance, of so many, as the guiders of diffusers count them."""
        return range(int(self.start * of), int(self.end * of))


WHOLE = GuidancePart()
