"""Pictures that the playground's form begins from: uploaded, shown small, and taken away again."""

from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import jobs_of, loras_of
from serve_app.api.images import MAX_FILE_BYTES
from serve_app.api.multipart import disk_errors, read_multipart
from serve_app.domain.errors import AtelierError, InvalidParameter
from serve_app.domain.families import abilities_of
from serve_app.jobs.previews import thumbnail
from serve_app.jobs.uploads import Hold
from serve_app.web.console.history import IMAGE_CACHE
from serve_app.web.console.pages import FormSession, PageSession, owner_caller, render, uncounted_owner
from serve_app.web.console.playground_form import DEFAULTS
from serve_app.web.console.playground_page import PURPOSE, playground_page, refusal
from serve_app.web.site.forms import check_form, redirect

router = APIRouter()

PICTURE_FIELDS = ("image_id", "mask_image_id")
FORM_LIFE = timedelta(hours=12)
"""A picture that no job was drawn from stays as long as a session can, with whatever form it is in."""
_FILE = "file"


@router.post("/pictures")
async def change_pictures(request: Request, session: FormSession) -> Response:
    """Keep a sent picture as the one to begin from, or, where there is one, as its mask; or take one away.

    Answers with the part of the form that shows them, or without JavaScript leads to the page with them.
    """
    form: Mapping[str, str] = {}
    try:
        form = await _receive(request, session)
    except AtelierError as error:
        return await _refused(request, session, error)
    ids = {name: form.get(name, "") for name in PICTURE_FIELDS}
    page = "compare" if form.get("page") == "compare" else "playground"
    if "hx-request" not in request.headers:
        return redirect(request, f"{page}?{urlencode({name: image_id for name, image_id in ids.items() if image_id})}")
    values = {**DEFAULTS, **ids}
    bases = await loras_of(request).applied_catalog.applied_base_models()
    takes_mask = any(abilities_of(each.pipeline).begins_late for each in bases)
    return render(request, "pictures.html", session, values=values, page=page, takes_mask=takes_mask)


@router.get("/pictures/{image_id}")
async def open_picture(request: Request, session: PageSession, image_id: str) -> Response:
    """Serve a small copy of any picture of the account."""
    jobs = jobs_of(request)
    found = await jobs.uploads.stored(uncounted_owner(request, session), image_id)
    webp = await thumbnail(jobs.images, jobs.space.disk, found.image.image_uri)
    return Response(webp, media_type="image/webp", headers={"Cache-Control": IMAGE_CACHE})


async def _receive(request: Request, session: FormSession) -> Mapping[str, str]:
    """Return the fields of the form, with the id of the picture that it sent, which counts as a request."""
    jobs, places = jobs_of(request), loras_of(request).uploads
    async with places.hold(session.who.id) as place:
        await jobs.space.check()
        with disk_errors():
            folder = await place.enter_async_context(places.folder())
            names, files = ("form_token", "page", "remove", *PICTURE_FIELDS), {_FILE: MAX_FILE_BYTES}
            form = await read_multipart(request, folder, texts=names, files=files, before_block=jobs.space.disk.check)
        check_form(session, form, PURPOSE)
        if "remove" in form:
            removed = PICTURE_FIELDS if form["remove"] == "image_id" else PICTURE_FIELDS[1:]
            return form | dict.fromkeys(removed, "")
        if not (folder / _FILE).exists():  # nothing is written of an empty file
            raise InvalidParameter("choose a PNG, JPEG or WebP file")
        caller = await owner_caller(request, session)
        added = await jobs.uploads.add(caller, folder / _FILE, place=place, hold=Hold(FORM_LIFE))
    field = PICTURE_FIELDS[1 if form.get("image_id") else 0]
    return form | {field: added.upload.image.image_id}


async def _refused(request: Request, session: FormSession, error: AtelierError) -> Response:
    """Say why beside the form, which stays as it is, or on its page."""
    answer = refusal(error)
    if "hx-request" in request.headers:
        response = render(request, "refused.html", session, **answer)
        response.headers.update({"HX-Retarget": "#picture-problem", "HX-Reswap": "innerHTML"})
    else:
        response = await playground_page(request, session, {}, **answer)
    response.headers["Connection"] = "close"  # a part of the body may not have been read
    return response
