"""Limits how many uploads of LoRAs an account has under way at once, in one process."""

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from serve_app.domain.errors import TooManyUploads

UPLOADS_AT_ONCE = 4
"""Of one account: slow uploads of many large files would take the disk, and their checks the places, from all others."""


class UploadPlaces:
    """Counts the uploads and fetches that have begun and are not registered yet."""

    def __init__(self, most: int = UPLOADS_AT_ONCE) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def hold(self, account_id: str) -> Generator[ExitStack]:
        """Hold a place; work that goes on afterwards keeps it by `pop_all`. Raises `TooManyUploads`."""
        if self._under_way[account_id] >= self._most:
            raise TooManyUploads(f"Your account has {self._most} uploads in progress; wait for one to finish.")
        self._under_way[account_id] += 1
        with ExitStack() as place:
            place.callback(self._leave, account_id)
            yield place

    def _leave(self, account_id: str) -> None:
        self._under_way[account_id] -= 1
        if not self._under_way[account_id]:
            del self._under_way[account_id]
