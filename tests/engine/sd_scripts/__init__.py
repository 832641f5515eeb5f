"""LoRAs that kohya's sd-scripts wrote, the latents it made with them, and the recipe."""
