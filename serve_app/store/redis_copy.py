"""Copies Redis by the stream that its replicas get, and keeps in it when it was last copied."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from redis.exceptions import ResponseError

from serve_app.atomic_files import atomic_file
from serve_app.domain.durations import MILLI
from serve_app.domain.errors import StoreUnavailable
from serve_app.store.keys import redis_key
from serve_app.store.redis_address import blocking_client, place_of
from serve_app.store.redis_client import OPTIONS, connect_sync, redis_errors
from serve_app.store.storage import open_filesystem, storage_errors

COPY_DUE = timedelta(hours=30)
"""A daily copy has failed when the last is older than this. The alert `AtelierBackupMissing` has the same."""
_SILENCE_S = 60
"""A server that prepares its snapshot says every ten seconds that it does."""
_PIECE_BYTES = 1 << 20


def store_copy(url: str, place: str, options: Mapping[str, Any], *, keep: int | None) -> str:
    """Store a snapshot as `redis-<time>.rdb` in a folder or below an fsspec URL, and return where.

    Only a whole one gets its name, and only then the oldest go: of all there are, `keep` stay. Raises
    `StoreUnavailable`.
    """
    try:
        files, folder = open_filesystem(place, options)
        folder, is_local = folder.rstrip("/"), "file" in files.protocol
        target = f"{folder}/redis-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.rdb"
        with TemporaryDirectory() as scratch:
            copy = Path(target if is_local else f"{scratch}/copy.rdb")
            with atomic_file(copy) as file:
                _receive(url, file)
            if not is_local:
                files.put_file(str(copy), target)
        for old in sorted(files.glob(f"{folder}/redis-*.rdb"))[: -keep if keep else 0]:
            files.rm_file(old)
        return files.unstrip_protocol(target)
    except (*storage_errors(), ValueError, ImportError) as error:  # fsspec does not know or cannot load the protocol
        raise StoreUnavailable(f"the copy could not be stored at {place}: {error}") from error


def _receive(url: str, file: BinaryIO) -> None:
    """Write the snapshot that a server sends to a replica, of which it says itself when it is whole."""
    options = {**OPTIONS, "socket_timeout": _SILENCE_S}
    with redis_errors(), blocking_client(url, **options) as client:
        connection: Any = client.connection_pool.get_connection()
        for option in (("capa", "eof"), ("rdb-only", "1")):
            connection.send_command("REPLCONF", *option)
            with suppress(ResponseError):  # servers before Redis 7 go on as with any replica, which does no harm
                connection.read_response()
        connection.send_command("SYNC")
        try:
            with connection._sock.makefile("rb") as stream:
                while not (head := stream.readline()).strip():
                    if not head:
                        raise EOFError("it was closed before it began")
                _read_snapshot(head.strip(), stream, file)
        except (OSError, EOFError) as error:
            raise StoreUnavailable(f"the copy of Redis at {place_of(url)} is not whole: {error}") from error
        finally:
            connection.disconnect()


def _read_snapshot(head: bytes, stream: Any, file: BinaryIO) -> None:
    """Read the bytes that the line before them counts, or all up to the mark that it names."""
    if head.startswith(b"$EOF:"):
        mark, rest = head[5:], b""
        while not rest.endswith(mark):
            file.write(rest[: -len(mark)])
            rest = rest[-len(mark) :] + _more(stream, _PIECE_BYTES)
        file.write(rest[: -len(mark)])
    elif head.startswith(b"$"):
        left = int(head[1:])
        while left:
            piece = _more(stream, min(left, _PIECE_BYTES))
            left -= file.write(piece)
    else:
        raise EOFError(head.decode(errors="replace"))


def _more(stream: Any, most: int) -> bytes:
    piece = stream.read1(most)
    if not piece:
        raise EOFError("it ended in its middle")
    return piece


def note_copy(url: str) -> None:
    """Write into Redis that it has just been copied. Raises `StoreUnavailable`."""
    with connect_sync(url) as client:
        seconds, _ = client.time()
        client.set(redis_key("copied"), seconds * MILLI)


def ask_copy_age(pipeline: Any) -> None:
    """Add the commands whose answers `copy_age_from` reads."""
    pipeline.get(redis_key("copied"))
    pipeline.zrange(redis_key("accounts"), 0, 0, withscores=True)
    pipeline.time()


def copy_age_from(answer: Sequence[Any]) -> timedelta | None:
    """Return how long ago Redis was copied, or its first account made if it never was; None without accounts."""
    copied, first, (seconds, _) = answer
    since_ms = copied or (first[0][1] if first else None)
    return None if since_ms is None else max(timedelta(), timedelta(seconds=seconds - int(since_ms) // MILLI))
