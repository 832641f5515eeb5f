"""Executors run jobs on the engine and the upscaler. They know neither Ray nor HTTP."""
