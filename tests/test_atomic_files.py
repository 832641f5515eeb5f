"""Atomic files: readers see the old content or the new, and a writer that fails leaves nothing behind."""

import threading
from pathlib import Path

import pytest

from serve_app.atomic_files import PRIVATE, atomic_file, write_atomically


def test_a_file_is_written_whole_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, "text")
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_writer_that_fails_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"ne")
            file.flush()
            assert Path(file.name).read_bytes() == b"ne"
            assert path.read_text() == "old"
            raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with atomic_file(path, mode=PRIVATE) as file:
        assert Path(file.name).stat().st_mode & 0o777 == PRIVATE
        file.write(b"secret")
    assert path.stat().st_mode & 0o777 == PRIVATE


def test_of_several_writers_that_may_not_overwrite_the_first_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    refused: list[str] = []
    start = threading.Barrier(8)

    def write(text: str) -> None:
        start.wait()
        try:
            write_atomically(path, text, overwrite=False)
        except FileExistsError:
            refused.append(text)

    threads = [threading.Thread(target=write, args=(f"writer {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert path.read_text() not in refused
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
