"""LoRAs that kohya's sd-scripts wrote, with the latents it made with them, and the recipe that writes them anew."""
