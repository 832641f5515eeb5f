"""Reads LoRA adapters of every common trainer into layer weights: names, shapes, scaling rules."""

from serve_app.engine.adapters.composed import compose
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter

__all__ = ["AdapterWeights", "LayerTable", "UnusableAdapter", "compose", "read_adapter"]
