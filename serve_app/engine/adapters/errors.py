"""The error of an adapter that cannot be used."""


class UnusableAdapter(ValueError):
    """The adapter is incompatible with this base model; the message says why, with the keys that offended."""
