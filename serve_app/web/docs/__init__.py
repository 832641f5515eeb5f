"""Serves OpenAPI documents and a reference with try-it-out, loading nothing from elsewhere."""
