"""Keeps LoRAs: the catalog, grants, uploads and their inspection, and the weights that workers read."""
