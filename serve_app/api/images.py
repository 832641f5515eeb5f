"""Path operations of `/v1/images`: pictures that an account uploads, for requests to begin from or to be masked by."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from serve_app.api.dependencies import CallerDep, IdempotencyKeyDep, acting_key, image_signer, jobs_of, loras_of
from serve_app.api.errors import COUNTED_ERRORS, error_responses
from serve_app.api.multipart import MEDIA_TYPE, read_multipart
from serve_app.api.openapi import CREATED_HEADERS, deletion, named, success
from serve_app.api.responses import created_headers, json_response
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import (
    DEFAULT_PAGE_SIZE,
    AnyJobId,
    ImageId,
    PageSize,
    Pixels,
    ResponseBody,
    Url,
    UtcTime,
    image_id_path,
    page_after,
)
from serve_app.domain.durations import Position
from serve_app.domain.errors import (
    IdempotencyConflict,
    ImageQuotaExceeded,
    InvalidParameter,
    JobUnfinished,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from serve_app.jobs.picture_file import KINDS, MAX_PIXELS, MAX_READ_PIXELS, MAX_READ_SIDE
from serve_app.jobs.uploads import Upload

router = APIRouter(route_class=ClosedRoute, tags=["Images"])

MAX_FILE_BYTES = 20 * 1000 * 1000
_FILE = "file"
_IMAGE: dict[str, Any] = {
    "id": "img_nq6w3s5kfrzp2xvd7bmtch4ylu",
    "url": "https://images.example/mountains.png",
    "width": 768,
    "height": 512,
    "size_bytes": 401221,
    "sha256": "9f" * 32,
    "created_at": "2026-11-21T12:00:00Z",
    "expires_at": "2026-12-21T12:00:00Z",
}
IMAGE = {"Image": _IMAGE}
_FORM: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": [_FILE],
    "properties": {
        _FILE: {
            "type": "string",
            "format": "binary",
            "description": (
                f"{KINDS[0].upper()}{KINDS[1:]} of at most {MAX_FILE_BYTES // 10**6} MB, {MAX_READ_SIDE} pixels on a "
                f"side and {MAX_READ_PIXELS} pixels in all, with 8 bits a channel and not animated. One of more than "
                f"{MAX_PIXELS} pixels is halved."
            ),
        }
    },
}
_ERRORS = {
    400: "The form has no `file` or another field, or the picture is damaged, too large, animated or of 16 bits.",
    409: "The `Idempotency-Key` was used before with another file, or your account's pictures take all bytes they may.",
    413: "The file is larger than this service accepts.",
    415: f"The body is no multipart form, or the file is not {KINDS}.",
}

_CURSOR = "[0-9]{1,14}-img_[a-z2-7]{26}"
Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR}$"})]
ImageName = Annotated[str, image_id_path("Its id.")]


class UploadedImage(ResponseBody):
    """A picture as it is stored. An uploaded one is a PNG in sRGB without metadata, upright, opaque, in grey or RGB.

    Your account stores and counts a picture once: uploaded again it is the same image, whose time begins again. One
    that came with an edit of `/openai/v1`, or in the playground, goes with the jobs that were drawn from it.
    """

    id: ImageId
    url: Url
    width: Pixels
    height: Pixels
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})]
    created_at: UtcTime
    expires_at: Annotated[
        UtcTime, Field(description="When it goes, unless a job needs it longer or you delete it before.")
    ]
    job_id: Annotated[AnyJobId | None, Field(description="The job that made it; absent for an uploaded one.")] = None


class UploadedImages(ResponseBody):
    """A page of uploaded pictures, newest first."""

    images: list[UploadedImage]
    next_cursor: Annotated[Cursor, Field(description="`cursor` of the next page; absent on the last.")] = None


@router.post(
    "/v1/images",
    operation_id="addImage",
    summary="Upload a picture: it is checked while you wait and stored as a PNG",
    status_code=201,
    response_model=UploadedImage,
    responses={
        201: success("Stored, turned upright, on white where it was transparent.", IMAGE, headers=CREATED_HEADERS),
        **error_responses(
            InvalidParameter,
            RequestTimeout,
            PayloadTooLarge,
            UnsupportedMediaType,
            IdempotencyConflict,
            ImageQuotaExceeded,
            *COUNTED_ERRORS,
            descriptions=_ERRORS,
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": _FORM, "examples": named({"File": {_FILE: "@picture.png"}})}},
        }
    },
)
async def add_image(request: Request, caller: CallerDep, idempotency_key: IdempotencyKeyDep) -> Response:
    async with loras_of(request).uploads.hold(caller.account_id) as place:
        sent = await read_multipart(request, place, texts=(), files={_FILE: MAX_FILE_BYTES})
        if _FILE not in sent.files:
            raise InvalidParameter(f"{_FILE}: is required and must be {KINDS} picture")
        added = await jobs_of(request).uploads.add(
            caller, sent.files[_FILE], place=place, idempotency_key=idempotency_key
        )
    headers = created_headers(request, f"/v1/images/{added.upload.image.image_id}", replayed=added.replayed)
    return json_response(_body(request, added.upload), status=201, headers=headers)


@router.get(
    "/v1/images",
    operation_id="listUploadedImages",
    summary="List the pictures that count against your account, newest first",
    response_model=UploadedImages,
    responses={
        200: success("A page of pictures.", {"Images": {"images": [_IMAGE]}}),
        **error_responses(InvalidParameter, *COUNTED_ERRORS),
    },
)
async def list_images(
    request: Request,
    caller: CallerDep,
    after: Annotated[Position | None, page_after(_CURSOR)],
    limit: PageSize = DEFAULT_PAGE_SIZE,
) -> Response:
    uploads, following = await jobs_of(request).uploads.records.page(caller.account_id, limit=limit, after=after)
    images = [_body(request, upload) for upload in uploads]
    return json_response(UploadedImages(images=images, next_cursor=following and following.cursor))


@router.get(
    "/v1/images/{image_id}",
    operation_id="getUploadedImage",
    summary="Read a picture that you uploaded or that a job made, with a fresh address",
    response_model=UploadedImage,
    responses={200: success("The picture.", IMAGE), **error_responses(*COUNTED_ERRORS, NotFound)},
)
async def get_image(request: Request, caller: CallerDep, image_id: ImageName) -> Response:
    return json_response(_body(request, await jobs_of(request).uploads.find(caller, image_id)))


@router.delete(
    "/v1/images/{image_id}",
    operation_id="deleteUploadedImage",
    summary="Delete an uploaded picture",
    **deletion(
        "Deleted.",
        JobUnfinished,
        descriptions={409: "A job that has not ended needs it: wait for the job, or cancel it first."},
    ),
)
async def delete_image(request: Request, caller: CallerDep, image_id: ImageName) -> Response:
    await jobs_of(request).uploads.delete(caller, image_id, by=acting_key(request, caller))
    return Response(status_code=204)


def _body(request: Request, upload: Upload) -> UploadedImage:
    image = upload.image
    return UploadedImage(
        id=image.image_id,
        url=image_signer(request)(image.image_uri),
        width=image.width,
        height=image.height,
        size_bytes=image.size_bytes,
        sha256=image.sha256,
        created_at=upload.created_at,
        expires_at=upload.expires_at,
        job_id=upload.job_id or None,
    )
