"""The page that reads what a picture says of how it was made. What is sent is kept nowhere."""

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import jobs_of, loras_of, settings_of
from serve_app.api.multipart import read_multipart
from serve_app.domain.errors import AtelierError, InvalidParameter
from serve_app.web.console.pages import ConsoleSession, FormSession, PageSession, owner_caller, render
from serve_app.web.console.playground_page import refusal
from serve_app.web.site.forms import check_form

router = APIRouter()

PURPOSE = "verify"
_FILE = "file"


@router.get("/verify")
async def open_verify(request: Request, session: PageSession) -> Response:
    return render(request, "verify.html", session, here="verify", notice="", rows=(), settings={})


@router.post("/pictures/verify")  # where proxies in front let an upload pass
async def verify(request: Request, session: FormSession) -> Response:
    """Read a picture and show its marks; one counts as a request, so that nobody tries a watermark out for nothing."""
    try:
        rows, settings = await _marks(request, session)
    except AtelierError as error:
        response = render(request, "verify.html", session, here="verify", rows=(), settings={}, **refusal(error))
        response.headers["Connection"] = "close"  # a part of the body may not have been read
        return response
    return render(request, "verify.html", session, here="verify", notice="", rows=rows, settings=settings)


async def _marks(request: Request, session: ConsoleSession) -> tuple[list[tuple[str, str]], Mapping[str, str]]:
    from serve_app.marking import reading  # here, so that commands start without Pillow

    jobs = jobs_of(request)
    async with loras_of(request).uploads.hold(session.who.id) as place:
        form, files = await read_multipart(request, place, texts=("form_token",), files={_FILE: reading.MAX_FILE_BYTES})
        check_form(session, form, PURPOSE)
        if (sent := files.get(_FILE)) is None:
            raise InvalidParameter("choose a PNG, JPEG or WebP file")
        await owner_caller(request, session)
        async with jobs.uploads.decoding:
            found = await reading.read(sent, sent.with_name("luminance"), settings_of(request).watermark_key)
    return reading.shown_marks(found), found.settings
