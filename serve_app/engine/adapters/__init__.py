"""LoRA adapters as people bring them, read into layer weights: every common trainer's names, shapes and scaling rules."""

from serve_app.engine.adapters.errors import UnusableAdapter
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter

__all__ = ["AdapterWeights", "LayerTable", "UnusableAdapter", "read_adapter"]
