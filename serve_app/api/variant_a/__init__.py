"""The room of variant A: `Authorization: Bearer`, generation, upscaling, and polling of both."""

from serve_app.api.variant_a.room import RoomA

__all__ = ["RoomA"]
