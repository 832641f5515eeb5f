"""Stores: Redis for jobs, accounts and sessions; fsspec for images and adapter weights."""
