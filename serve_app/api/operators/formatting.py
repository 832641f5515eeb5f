"""Formats durations, ages and sizes for the operators' pages."""

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """Write a duration in the largest unit that fits: `45 s`, `12 min`, `3 h`, `8 d`."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(number: float) -> str:
    """Write bytes in decimal units: `850 kB`, `1.2 GB`."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}" if number < 10 * length else f"{number / length:.0f} {unit}"
    return f"{number:.0f} B"
