"""Shows pictures in terminals that can: by the protocol of kitty, that of iTerm2, or as sixels."""

import base64
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Mapping
from enum import StrEnum
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

SHOWN_PX = 512
"""Longest side of a picture in the terminal; the file keeps its size."""
ANSWER_S = 0.3
"""Longest wait for a terminal that does not tell what it can."""
KITTY_CHUNK = 4096
"""Bytes of one escape sequence: https://sw.kovidgoyal.net/kitty/graphics-protocol"""
_COLORS = 256
_BAND = 6  # rows of pixels in one row of sixels
_CSI_SIXEL = "4"  # in the answer to DA1: https://vt100.net/docs/vt510-rm/DA1.html
_DA1, _DA1_ANSWER = b"\x1b[c", re.compile(rb"\x1b\[\?([0-9;]*)c")
_REPEATED = re.compile(rb"(.)\1{3,}", re.DOTALL)


class Protocol(StrEnum):
    """How a terminal takes a picture."""

    KITTY = "kitty"
    ITERM2 = "iterm2"
    SIXEL = "sixel"


def show_pictures(files: Iterable[Path], environ: Mapping[str, str]) -> None:
    """Show PNG files on stdout, which is a terminal, if that can; else nothing is written."""
    protocol = protocol_of(environ)
    if protocol is None:
        return
    for file in files:
        sys.stdout.write(encode(_read(file), protocol) + "\n")
    sys.stdout.flush()


def protocol_of(environ: Mapping[str, str]) -> Protocol | None:
    """Return the protocol of this terminal: by its environment variables, else by its answer to DA1."""
    if not _is_multiplexed(environ):
        if "KITTY_WINDOW_ID" in environ or environ.get("TERM") in ("xterm-kitty", "xterm-ghostty"):
            return Protocol.KITTY
        if environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
            return Protocol.ITERM2
    return Protocol.SIXEL if _draws_sixels(environ) else None


def encode(picture: Image.Image, protocol: Protocol) -> str:
    """The escape sequences that show an RGB picture."""
    if protocol is Protocol.SIXEL:
        return _sixels(picture)
    png = BytesIO()
    picture.save(png, "PNG")
    data = base64.b64encode(png.getvalue()).decode()
    if protocol is Protocol.ITERM2:
        return f"\x1b]1337;File=inline=1;size={png.tell()};preserveAspectRatio=1:{data}\x07"
    return _kitty_chunks(data)


def _is_multiplexed(environ: Mapping[str, str]) -> bool:
    """tmux and screen pass on the outer terminal's variables, but not its pictures."""
    return "TMUX" in environ or environ.get("TERM", "").startswith(("screen", "tmux"))


def _read(file: Path) -> Image.Image:
    with Image.open(file, formats=["PNG"]) as picture:
        shown = picture.convert("RGB")
    shown.thumbnail((SHOWN_PX, SHOWN_PX))
    return shown


def _kitty_chunks(data: str) -> str:
    """A PNG to transmit and show; `q=2`: the terminal answers nothing, which the shell would read."""
    chunks = [data[start : start + KITTY_CHUNK] for start in range(0, len(data), KITTY_CHUNK)]
    heads = ["a=T,f=100,q=2," if index == 0 else "" for index in range(len(chunks))]
    return "".join(
        f"\x1b_G{head}m={int(index < len(chunks) - 1)};{chunk}\x1b\\"
        for index, (head, chunk) in enumerate(zip(heads, chunks, strict=True))
    )


def _sixels(picture: Image.Image) -> str:
    """Encode bands of six rows of pixels, each color of a band on its own.

    See https://vt100.net/docs/vt3xx-gp/chapter14.html.
    """
    paletted = picture.quantize(_COLORS)
    pixels, (width, height) = np.asarray(paletted), paletted.size
    colors = np.asarray(paletted.getpalette()).reshape(-1, 3)
    palette = "".join(
        "#{};2;{};{};{}".format(index, *(round(int(part) * 100 / 255) for part in color))
        for index, color in enumerate(colors)
    )
    bands = "-".join(_band(pixels[top : top + _BAND]) for top in range(0, height, _BAND))
    return f'\x1bPq"1;1;{width};{height}{palette}{bands}\x1b\\'


def _band(rows: np.ndarray) -> str:
    weights = (1 << np.arange(len(rows)))[:, None]
    lines = (
        f"#{color}{_run_lengths((63 + ((rows == color) * weights).sum(axis=0)).astype(np.uint8).tobytes())}"
        for color in np.unique(rows)
    )
    return "$".join(lines)


def _run_lengths(sixels: bytes) -> str:
    return _REPEATED.sub(lambda run: b"!%d%b" % (len(run[0]), run[1]), sixels).decode()


def _draws_sixels(environ: Mapping[str, str]) -> bool:
    """Ask the terminal whether it draws sixels.

    Nothing is sent to a dumb terminal, nor unless it is both read and written.
    """
    if environ.get("TERM", "dumb") == "dumb" or not sys.stdin.isatty():
        return False
    answer = _ask(sys.stdin.fileno(), sys.stdout.fileno())
    return _CSI_SIXEL in answer.split(";")


def _ask(reads: int, writes: int) -> str:
    """The parameters of the answer to DA1; empty without an answer. What was typed before it is lost."""
    before = termios.tcgetattr(reads)
    try:
        tty.setcbreak(reads, termios.TCSANOW)
        os.write(writes, _DA1)
        return _read_answer(reads)
    finally:
        termios.tcsetattr(reads, termios.TCSANOW, before)


def _read_answer(reads: int) -> str:
    received, deadline = b"", time.monotonic() + ANSWER_S
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reads], [], [], left)[0]:
            break
        received += os.read(reads, 256)
        if answer := _DA1_ANSWER.search(received):
            return answer[1].decode()
    return ""
