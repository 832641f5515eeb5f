"""Serves OpenAPI documents and a reference with try-it-out, loading nothing from elsewhere."""

from serve_app.web.docs.routes import STATIC, docs_router

__all__ = ["STATIC", "docs_router"]
