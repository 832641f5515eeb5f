"""Atelier: text-to-image generation with many LoRA adapters, as asynchronous jobs. The map is `README.md` beside this file."""
