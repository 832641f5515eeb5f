"""Upscales images with a small network, tile by tile. It needs torch alone, so that its replicas start in seconds."""
