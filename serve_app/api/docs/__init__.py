"""The documents: OpenAPI for programs, and a reference with try-it-out for people. Nothing is loaded from elsewhere."""

from serve_app.api.docs.routes import STATIC, docs_router

__all__ = ["STATIC", "docs_router"]
