"""Formats sizes for the operators' pages."""


def size(number: float) -> str:
    """Write bytes in decimal units: `850 kB`, `1.2 GB`."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}" if number < 10 * length else f"{number / length:.0f} {unit}"
    return f"{number:.0f} B"
