"""Workers claim jobs and run them on the engine or the upscaler. They know neither Ray nor HTTP."""
