"""Error pages of the console and of the operators' pages, in their own layout."""

from collections.abc import Callable
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve_app.domain.errors import StoreUnavailable, UnreadableRecord

ProblemPage = Callable[[Request, int, str, str], Response]
"""Renders status, title and text."""

_TEXTS = {404: "Page not found.", 405: "This page does not support that method."}
"""Instead of what the router says."""
LINK_GONE = "This link has been used or is too old. Sign in with the password, or ask for another link."


def answer_with_pages(app: FastAPI, page: ProblemPage) -> None:
    """Answer client errors, outages and unexpected errors with pages."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        text = _TEXTS.get(status, error.detail) if error.detail == status.phrase else error.detail
        response = page(request, status, status.phrase.capitalize(), text)
        response.headers.update(error.headers or {})
        return response

    async def unavailable(request: Request, _error: Exception) -> Response:
        text = "The service is temporarily unavailable. Try again in a few seconds."
        response = page(request, 503, "Temporarily unavailable", text)
        response.headers["Retry-After"] = "5"
        return response

    async def unreadable(request: Request, _error: Exception) -> Response:
        text = "Another version of this service wrote the record, or it is damaged. Nothing else is affected."
        return page(request, 500, "This record cannot be read", text)

    async def internal_error(request: Request, _error: Exception) -> Response:
        text = "The error has been logged. Going back and trying again may help."
        return page(request, 500, "Internal error", text)

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(StoreUnavailable, unavailable)
    app.add_exception_handler(UnreadableRecord, unreadable)
    app.add_exception_handler(Exception, internal_error)
