"""The contracts to read: OpenAPI documents for programs, and one page each for people. Nothing is loaded from elsewhere."""

from serve_app.api.docs.routes import Document, routes

__all__ = ["Document", "routes"]
