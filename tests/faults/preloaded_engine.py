"""Loads torch, diffusers and the demo model once; worker processes are forked from it.

A fork copies only the thread that forks, so nothing here may have started another one.
"""

import gc

import torch

from serve_app.engine import Engine, EngineOptions
from tests.support import POCKET

torch.set_num_threads(1)
ENGINE = Engine.load({"pocket": POCKET}, EngineOptions(max_rows=8, threads=1))
gc.freeze()  # or each worker's garbage collector would look at all of it, and so copy it
