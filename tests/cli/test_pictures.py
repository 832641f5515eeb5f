"""Pictures in terminals: which protocol is chosen, and what the terminal gets, over a pseudo-terminal."""

import base64
import os
import pty
import re
import select
import sys
import termios
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serve_app.cli import app
from serve_app.cli.images import drawing, time_left
from serve_app.cli.pictures import KITTY_CHUNK, SHOWN_PX, Protocol, encode, protocol_of, show_pictures
from tests.cli.conftest import Atelier
from tests.live import Live
from tests.support import wait_until

DA1, WITH_SIXELS, WITHOUT = b"\x1b[c", b"\x1b[?62;4;22c", b"\x1b[?62;14;22c"
XTERM = {"TERM": "xterm-256color"}
SIXELS = re.compile(r'\x1bPq"1;1;(\d+);(\d+)(.*)\x1b\\', re.DOTALL)


class Terminal:
    """The far end of a pseudo-terminal: keeps what is written to it, and answers DA1."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self.received = answer, b""
        self._end, self.fd = pty.openpty()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = False
        try:
            while block := os.read(self._end, 65536):
                self.received += block
                if DA1 in self.received and not answered:
                    answered = True
                    os.write(self._end, self._answer)
        except OSError:  # nobody holds the other end any more
            return

    def text(self) -> str:
        """All that was written, once nobody writes any more."""
        os.close(self.fd)
        self._thread.join(10)
        os.close(self._end)
        return self.received.decode()


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Terminal:
    return Terminal(getattr(request, "param", WITHOUT))


@contextmanager
def attached(terminal: Terminal) -> Generator[None]:
    """Attach the terminal in the place of stdin, stdout and stderr.

    It is no fixture, since pytest sets them between a fixture and the test.
    """
    with (
        os.fdopen(terminal.fd, closefd=False) as stdin,
        os.fdopen(terminal.fd, "w", closefd=False) as stdout,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stdout)
        yield


def protocol_in(terminal: Terminal, environ: Mapping[str, str]) -> Protocol | None:
    with attached(terminal):
        return protocol_of(environ)


def shown_in(terminal: Terminal, files: list[Path], environ: Mapping[str, str]) -> str:
    with attached(terminal):
        show_pictures(files, environ)
    return terminal.text()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A gradient, which no palette holds exactly."""
    ramp = np.linspace(0, 255, 30).astype(np.uint8)
    rows = np.stack(np.broadcast_arrays(ramp[:20, None], ramp[None, :], np.uint8(90)), axis=-1)
    Image.fromarray(rows).save(tmp_path / "x.png")
    return tmp_path / "x.png"


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, Protocol.KITTY),
        ({**XTERM, "KITTY_WINDOW_ID": "1"}, Protocol.KITTY),
        ({"TERM": "xterm-ghostty"}, Protocol.KITTY),
        ({**XTERM, "TERM_PROGRAM": "iTerm.app"}, Protocol.ITERM2),
        ({**XTERM, "TERM_PROGRAM": "WezTerm"}, Protocol.ITERM2),
        ({**XTERM, "LC_TERMINAL": "iTerm2"}, Protocol.ITERM2),
        (XTERM, None),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"}, None),
        ({**XTERM, "TERM_PROGRAM": "iTerm.app", "TMUX": "/tmp/tmux"}, None),
        ({"TERM": "dumb"}, None),
        ({}, None),
    ],
)
def test_a_terminal_is_known_by_what_it_says(
    terminal: Terminal, environ: dict[str, str], protocol: Protocol | None
) -> None:
    assert protocol_in(terminal, environ) is protocol


@pytest.mark.parametrize(
    ("terminal", "protocol"),
    [(WITH_SIXELS, Protocol.SIXEL), (b"\x1b[?4c", Protocol.SIXEL), (WITHOUT, None), (b"", None), (b"noise", None)],
    indirect=["terminal"],
)
def test_another_is_asked_for_sixels_and_left_as_it_was(terminal: Terminal, protocol: Protocol | None) -> None:
    before = termios.tcgetattr(terminal.fd)
    assert protocol_in(terminal, XTERM) is protocol
    assert termios.tcgetattr(terminal.fd) == before
    assert select.select([terminal.fd], [], [], 0)[0] == [], "the answer is not left for the shell to read"


@pytest.mark.parametrize("terminal", [WITH_SIXELS], indirect=True)
def test_a_dumb_terminal_is_asked_nothing(terminal: Terminal, picture: Path) -> None:
    assert shown_in(terminal, [picture], {"TERM": "dumb"}) == ""


def test_kitty_gets_the_png_in_chunks(terminal: Terminal, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    shown = shown_in(terminal, [tmp_path / "x.png"], {"TERM": "xterm-kitty"})
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", shown)
    assert [head for head, _ in chunks] == ["a=T,f=100,q=2,m=1", *["m=1"] * (len(chunks) - 2), "m=0"]
    assert max(len(data) for _, data in chunks) == KITTY_CHUNK
    assert np.array_equal(_decoded("".join(data for _, data in chunks)), noise)


def test_iterm2_gets_the_png(terminal: Terminal, picture: Path) -> None:
    text = shown_in(terminal, [picture, picture], {**XTERM, "TERM_PROGRAM": "iTerm.app"})
    shown = re.findall(r"\x1b\]1337;File=inline=1;size=(\d+);preserveAspectRatio=1:([^\x07]*)\x07", text)
    assert len(shown) == 2
    size, data = shown[0]
    assert len(base64.b64decode(data)) == int(size)
    with Image.open(picture) as original:
        assert np.array_equal(_decoded(data), np.asarray(original))


def test_sixels_draw_the_picture(picture: Path) -> None:
    with Image.open(picture) as original:
        drawn = _drawn(encode(original.convert("RGB"), Protocol.SIXEL))
        difference = np.abs(drawn.astype(int) - np.asarray(original))
    assert drawn.shape == (20, 30, 3)
    assert difference.max() <= 16, "a palette of 256 colors, in percent"


def test_a_large_picture_is_shown_smaller(terminal: Terminal, tmp_path: Path) -> None:
    Image.new("RGB", (2048, 1024)).save(tmp_path / "x.png")
    data = re.findall(r";([^\x1b]*)\x1b\\", shown_in(terminal, [tmp_path / "x.png"], {"TERM": "xterm-kitty"}))
    assert _decoded("".join(data)).shape == (SHOWN_PX // 2, SHOWN_PX, 3)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (-3.0, ""), (0.2, "1 second left"), (91.0, "2 minutes left")],
)
def test_the_time_left_in_words(seconds: float | None, words: str) -> None:
    assert time_left(seconds) == words


def test_what_is_drawn_in_words() -> None:
    assert drawing(2, 512, 512, "Neon") == "Drawing 2 × 512², Neon"
    assert drawing(1, 768, 512, "Neon") == "Drawing 1 × 768×512, Neon"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "more", "are_shown"),
    [(WITH_SIXELS, (), True), (WITH_SIXELS, ("--no-inline",), False), (WITH_SIXELS, ("--json",), False)],
    indirect=["terminal"],
)
def test_the_command_draws_in_the_terminal(
    terminal: Terminal, atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], are_shown: bool,
) -> None:  # fmt: skip
    for name in ("TMUX", "KITTY_WINDOW_ID", "TERM_PROGRAM", "LC_TERMINAL"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {**atelier.env, **XTERM}.items():
        monkeypatch.setenv(name, text)
    words = ("generate", "a lighthouse", "--lora", "outline", "--out", str(tmp_path / "x.png"), *more)
    with attached(terminal), pytest.raises(SystemExit, match="0"):
        app(words)
    shown = terminal.text()
    assert "Drawing 1 × 512², Outline" in shown
    assert re.search(r"\d+ (second|minute)s? left", shown), "by the service's estimate, before there is progress"
    assert (DA1.decode() in shown, bool(SIXELS.search(shown))) == (are_shown, are_shown)


@pytest.mark.slow
def test_images_are_opened_by_the_viewer(
    atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer, opened, out = tmp_path / "xdg-open", tmp_path / "opened", tmp_path / "x.png"
    words = ("generate", "a lighthouse", "--lora", "outline", "--out", str(out), "--open")
    monkeypatch.setenv("PATH", str(tmp_path))
    without = atelier(*words)
    assert (without.code, "no program that opens" in without.err, out.exists()) == (1, True, True)
    viewer.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.part && /bin/mv {opened}.part {opened}\n')
    viewer.chmod(0o755)
    assert atelier(*words).code == 0
    live.run(wait_until(opened.exists))
    assert opened.read_text() == str(out)


def _decoded(data: str) -> np.ndarray:
    with Image.open(BytesIO(base64.b64decode(data))) as shown:
        return np.asarray(shown.convert("RGB"))


def _drawn(sixels: str) -> np.ndarray:
    """As a terminal draws them."""
    found = SIXELS.fullmatch(sixels)
    assert found is not None
    pixels = np.zeros((int(found[2]), int(found[1]), 3), np.uint8)
    colors: dict[str, list[int]] = {}
    top = left = 0
    color = ""
    for token in re.finditer(r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|!(\d+)([?-~])|([?-~])|([$-])", found[3]):
        if token[1]:
            colors[token[1]] = [round(int(part) * 255 / 100) for part in token.group(2, 3, 4)]
        elif token[5]:
            color = token[5]
        elif token[9]:
            left, top = 0, top + (6 if token[9] == "-" else 0)
        else:
            count, bits = int(token[6] or 1), ord(token[7] or token[8]) - 63
            for row in (row for row in range(6) if bits & (1 << row)):
                pixels[top + row, left : left + count] = colors[color]
            left += count
    return pixels
