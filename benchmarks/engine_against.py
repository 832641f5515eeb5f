"""The engine of an older commit and of this one, in turn in one run: images a second with eight LoRAs, and a lone image.

    .venv/bin/python -m benchmarks.engine_against COMMIT [--side 512] [--steps 4] [--jobs 8] [--turns 5]

Each is a process of its own, from a git worktree of the commit and from this checkout, with this environment's packages
and two threads. Ratios are old to new, turn by turn. Pictures are compared: a lone job's with the same job's in the
batch, byte by byte, and old with new, whose last bits may differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.http_against import worktree
from benchmarks.servers import spread
from serve_app.settings import ROOT

CHILD = """
import json, sys, time
import numpy as np
import torch
from pathlib import Path
torch.set_num_threads(2)
import serve_app
assert Path(serve_app.__file__).is_relative_to(Path.cwd()), serve_app.__file__
from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
side, steps, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
loras = sorted(Path("models/pocket/loras").glob("*.safetensors"))
engine = Engine.load(Path("models/pocket"), EngineOptions(device="cpu", max_rows=16))
engine.warm_up(side, side)
print("ready", flush=True)
for line in sys.stdin:
    began, images = time.perf_counter(), {}
    for i in range(int(line)):
        file = loras[i % len(loras)]
        engine.add(RunRequest(run_id=str(i), prompt="a red circle on a blue background", scale=1.0, seed=i, steps=steps,
                              adapter=AdapterFile(file.name, file), guidance=5.0, width=side, height=side))
    while engine.has_work:
        for ended in engine.step():
            assert ended.image is not None, ended.failure
            images[ended.run_id] = ended.image
    seconds = time.perf_counter() - began
    np.savez(folder / "images.npz", **images)
    print(json.dumps(seconds), flush=True)
"""


class Turn(NamedTuple):
    seconds: float
    images: dict[str, np.ndarray]


class Drawer:
    """An engine in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self._folder = process, folder
        assert self._read() == "ready\n", "the engine did not start"

    def draw(self, jobs: int) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{jobs}\n")
        self._process.stdin.flush()
        seconds = json.loads(self._read())
        with np.load(self._folder / "images.npz") as images:
            return Turn(seconds, dict(images))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def drawer(checkout: Path, options: argparse.Namespace) -> Generator[Drawer]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="engine-against-") as folder:
        command = [sys.executable, "-c", CHILD, str(options.side), str(options.steps), folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Drawer(process, Path(folder))
            finally:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with ExitStack() as stack:
        checkouts = {"old": stack.enter_context(worktree(options.commit)), "new": ROOT}
        drawers = {name: stack.enter_context(drawer(checkout, options)) for name, checkout in checkouts.items()}
        turns: dict[str, list[tuple[Turn, Turn]]] = {name: [] for name in drawers}
        for _ in range(1 + options.turns):
            for name, each in drawers.items():
                turns[name].append((each.draw(options.jobs), each.draw(1)))
    print("\n".join(report({name: rounds[1:] for name, rounds in turns.items()}, options.jobs)))  # the first warms up


def report(turns: dict[str, list[tuple[Turn, Turn]]], jobs: int) -> Generator[str]:
    for name, rounds in turns.items():
        together, lone = rounds[-1]
        speeds, latencies = [jobs / each.seconds for each, _ in rounds], [each.seconds for _, each in rounds]
        equal = np.array_equal(lone.images["0"], together.images["0"])
        yield f"{name}: {spread(speeds)} images/s, alone {spread(latencies, 3)} s, equal alone and together: {equal}"
    pairs = list(zip(turns["old"], turns["new"], strict=True))
    for place, what in enumerate((f"{jobs} jobs", "a lone image")):
        yield f"old / new, {what}: {spread([old[place].seconds / new[place].seconds for old, new in pairs])}"
    old, new = pairs[-1][0][0].images, pairs[-1][1][0].images
    far = max(int(abs(old[key].astype(int) - new[key]).max()) for key in old)
    yield f"old and new pictures differ by {far} of 255 at most; load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
