"""Reads LoRA adapters of every common trainer into layer weights: names, shapes, scaling rules."""
