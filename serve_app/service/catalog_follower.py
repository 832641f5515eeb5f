"""Applies changes of the catalog file without a restart."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from serve_app.service.resources import Resources
from serve_app.stores.catalog_file import CatalogError, SetAside

_log = logging.getLogger(__name__)

AGAIN_AFTER = timedelta(minutes=1)
"""Rows that are set aside are tried again after this, even though the file is the same: their weights may be there now."""
Version = tuple[int, int, int] | None


class CatalogFollower:
    """Applies the catalog file when it has changed, and logs each error once."""

    def __init__(self, resources: Resources, *, again_after: timedelta = AGAIN_AFTER) -> None:
        self._resources = resources
        self._again_after = again_after.total_seconds()
        self._applied: Version = None
        self._logged: Sequence[str] = ()
        self._again = 0.0

    async def look(self) -> None:
        """Apply the file unless it is the one that was applied. Raises `StoreUnavailable`: look again."""
        version = _version(self._resources.settings.catalog)
        if version == self._applied and time.monotonic() < self._again:
            return
        try:
            set_aside = await self._resources.applied_catalog.apply_file()
        except CatalogError as error:
            set_aside = [SetAside("", f"{error}: what was applied before stays")]
        self._log_new([row.reason for row in set_aside])
        self._applied = version
        self._again = time.monotonic() + self._again_after if set_aside else float("inf")

    def _log_new(self, mistakes: Sequence[str]) -> None:
        for mistake in mistakes:
            if mistake not in self._logged:
                _log.error("catalog: set aside: %s", mistake)
        self._logged = mistakes


def _version(path: Path) -> Version:
    """Return the file's version, which changes with it; None while it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
