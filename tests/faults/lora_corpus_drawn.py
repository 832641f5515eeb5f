"""Offers every hostile LoRA file to one process with an engine, and draws a base prompt after each.

`python -m tests.faults.lora_corpus_drawn FOLDER` offers each to the weight store, then to the engine itself, and prints
what came of it: the errors, the processor time, the peak of memory while it was looked at, and the PNG's digest after
it.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.engine import AdapterFile, Engine, EngineOptions
from serve_app.loras.weights import WeightStore
from serve_app.settings import Settings
from serve_app.worker.image_files import encode_png
from tests.faults.lora_corpus import CORPUS, Write, hostile_adapter, offer, peak_mb, processor_time
from tests.support import POCKET

GOOD = POCKET / "loras" / "outline.safetensors"
HUGE = struct.pack("<f", 1e38)


def _changed(*, name: bytes = b"", body: bytes = b"") -> Write:
    """A good LoRA of the pocket model, its layers called otherwise, or its numbers replaced."""

    def write(path: Path) -> None:
        content = GOOD.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        if name:
            header = {key.replace("unet.", name.decode()): value for key, value in header.items()}
        end = 0
        for key, tensor in header.items():
            if body and key != "__metadata__":
                size = 4 * int(np.prod(tensor["shape"]))
                tensor |= {"dtype": "F32", "data_offsets": [end, end + size]}
                end += size
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + (body * (end // 4) or content[8 + length :]))

    return write


WELL_FORMED: dict[str, Write] = {
    "layers of no model": _changed(name=b"unet.nowhere."),
    "layers of a transformer": _changed(name=b"transformer.single_transformer_blocks.0."),
    "finite numbers that overflow": _changed(body=HUGE),
}
"""Files that the store keeps and only the engine can refuse."""


def main(folder: Path) -> None:
    store = WeightStore(Settings(data_dir=folder / "var", redis_url="unix:///unused"))
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2)) as engine:
        base = _base_picture(engine)
        rows: dict[str, Any] = {}
        for name, write in (CORPUS | WELL_FORMED).items():
            with _measured() as row:
                kept = offer(store, folder / "offered", write)
                row |= {"store": kept["outcome"], "engine": _offer_to(engine, folder / "offered", write)}
            rows[name] = row | {"equal": _base_picture(engine) == base}
    sys.stdout.write(json.dumps(rows))


def _offer_to(engine: Engine, path: Path, write: Write) -> str:
    write(path)
    try:
        adapter = AdapterFile(id=hostile_adapter(path).sha256 + path.name, path=path)
        engine.generate("a red circle", adapter=adapter, weight=1.0, steps=2, width=256, height=256)
    except RuntimeError as error:
        return f"refused: {error}"
    finally:
        path.unlink()
    return "drawn"


def _base_picture(engine: Engine) -> str:
    (image,) = engine.generate("a red circle", seeds=(5,), steps=2, width=256, height=256)
    return hashlib.sha256(encode_png(np.asarray(image))).hexdigest()


@contextmanager
def _measured() -> Generator[dict[str, Any]]:
    """Measure the processor time of all threads and children, and the peak of memory.

    Memory is counted from what the process held at the start.
    """
    row: dict[str, Any] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    held, began = peak_mb(), processor_time()
    yield row
    row |= {"seconds": processor_time() - began, "mb": peak_mb() - held}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
