"""`atelier marking init` makes a certificate for development; `atelier verify` reads the marks of pictures."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.command import Result, command
from serve_app.domain.errors import InvalidParameter
from serve_app.settings import Settings

if TYPE_CHECKING:
    from serve_app.marking.reading import FoundMarks

app = typer.Typer(no_args_is_help=True, help="Prepare this service for marking its images.")


@command(app, "init")
def init(settings: Settings) -> Result:
    """Make a certificate with which images are signed until you have a real one.

    It is for development: its CA is made for it alone, and nobody trusts it.
    """
    from serve_app.marking.certificates import make_for_development

    certificate, key = settings.marking_files
    make_for_development(certificate, key)
    shown = (
        f"{certificate}\n{key}\n"
        "A certificate and a CA for development: whoever checks an image sees that nobody trusts them.\n"
        "For customers, get a certificate for C2PA and name it by ATELIER_MARKING_CERTIFICATE and ATELIER_MARKING_KEY.\n"
        "Marking is off until ATELIER_MARK_IMAGES=true."
    )
    return Result(facts={"certificate": str(certificate), "key": str(key), "is_development": True}, shown=shown)


def verify(
    settings: Settings,
    files: Annotated[list[Path], typer.Argument(help="PNG, JPEG or WebP files.", show_default=False)],
) -> Result:
    """Read what pictures say of how they were made: XMP, C2PA, this service's watermark, a drawing's settings.

    The exit code is 1 where a file cannot be read, or its C2PA manifest does not hold.
    """
    from serve_app.marking.reading import shown_marks

    key = settings.watermark_key if settings.has_watermark_key else None
    facts: list[dict[str, Any]] = []
    lines: list[str] = []
    for file, marks in zip(files, asyncio.run(_read_all(files, key)), strict=True):
        if isinstance(marks, str):
            facts.append({"file": str(file), "error": marks})
            lines.append(f"{file}: {marks}")
        else:
            facts.append({"file": str(file), **asdict(marks), "has_watermark": marks.has_watermark})
            rows = [*shown_marks(marks), *marks.settings.items()]
            shown = (f"{name}: {text}".replace("\n", "\n      ") for name, text in rows)  # no text begins a line
            lines += [str(file), *(f"  {row}" for row in shown)]
    failed = any("error" in each or (each["manifest"] or {}).get("state") == "Invalid" for each in facts)
    return Result(facts={"files": facts}, shown="\n".join(lines), failed=failed)


async def _read_all(files: Sequence[Path], key: bytes | None) -> list["FoundMarks | str"]:
    """Return the marks of each file, or why it cannot be read."""
    from serve_app.marking.reading import read

    found: list[FoundMarks | str] = []
    with TemporaryDirectory() as folder:
        for file in files:
            try:
                found.append(await read(file, Path(folder) / "luminance", key))
            except InvalidParameter as error:
                found.append(error.message.removeprefix("file: "))
    return found
