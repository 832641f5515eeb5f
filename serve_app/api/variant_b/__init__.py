"""The room of variant B: `X-API-Key`, generation runs, and the models an account may use."""

from serve_app.api.variant_b.room import RoomB

__all__ = ["RoomB"]
