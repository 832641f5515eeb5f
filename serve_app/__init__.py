"""Atelier: text-to-image generation with many LoRA adapters, as asynchronous jobs.

See `docs/understand/architecture.md`.
"""
