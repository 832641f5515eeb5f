"""Tells what base models weigh by their files' headers, places or refuses them by that, and watches them load."""

import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from serve_app.engine.device import SPARE_PART, free_host_memory, free_memory, memory_limit, torch_device, torch_dtype
from serve_app.engine.families.checkpoint import UNNEEDED, Source, as_checkpoint, named_parts, variant_of
from serve_app.engine.families.family import Placement
from serve_app.engine.families.single_file import part_in_file
from serve_app.engine_options import EngineOptions
from serve_app.model_folder import index_of

log = logging.getLogger(__name__)

GB = 10**9
WATCH_S = 1.0
"""A load's progress is measured this often, which takes 0.1 s of a core for a Stable Diffusion 1.5."""
ROOM = 2**30
"""Unless the weights leave this many bytes, text encoders stay on the host; decoding 512² pixels takes 0.4 GB."""
_UNUSED = re.compile(r"model_ema\.|(.+\.)?(lm_head|visual|time_conv)\.")
"""Averages of training, what of text encoders makes words or looks at pictures, and what of Qwen's VAE follows a video's
first frame are not loaded."""
_INTEGER_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def place(sources: Mapping[str, Source], options: EngineOptions) -> dict[str, Placement]:
    """Settle by name where base models' parts are, by the headers of their files and what their device has free.

    Raises MemoryError with the sums and what would help where they cannot fit.
    """
    device, dtype = torch_device(options), torch_dtype(options)
    parts = {name: part_bytes(source, dtype) for name, source in sources.items()}
    adapters, free = options.adapter_memory * len(sources), free_memory(device)
    on_host = set[str]() if device.type == "cpu" else encoders_on_host(parts, free - adapters)
    beside = sum(encoder_bytes(parts[name]) for name in on_host)
    weights = sum(sum(sizes.values()) for sizes in parts.values()) - beside
    needed = weights + adapters
    listed = {
        name: ", ".join(f"{part} {size / GB:.2f}" for part, size in sizes.items()) for name, sizes in parts.items()
    }
    said = [f"{name} takes {_gigabytes(*sizes.values())} ({listed[name]})" for name, sizes in parts.items()]
    said += [f"text encoders of {', '.join(sorted(on_host))} in host memory {_gigabytes(beside)} less"] * bool(on_host)
    said += [f"adapters take {_gigabytes(adapters)} (adapter_memory)"] if adapters else []
    sums = f"as {str(dtype).removeprefix('torch.')}, {', '.join(said)}: {_gigabytes(needed)} in all"
    cures = ["`dtype: bfloat16`, half as much"] if dtype == torch.float32 else []
    cures += ["a smaller `adapter_memory`"] if adapters else []
    cures += ["fewer base models"] if len(sources) > 1 else []
    if needed > free:
        cures += ["more memory" if device.type == "cpu" else "a larger `memory_fraction`, or a card with more memory"]
        raise MemoryError(f"{sums}, and {device} has {_gigabytes(free)} free; what helps: {'; '.join(cures)}")
    if beside > (host := free_host_memory()):
        cures += ["more host memory, or a card with more memory"]
        raise MemoryError(f"{sums}, and the host has {_gigabytes(host)} free; what helps: {'; '.join(cures)}")
    log.info("%s, of %s free on %s", sums, _gigabytes(free), device)
    decoding = 0 if device.type == "cpu" else decoding_bytes(memory_limit(device) - weights, adapters)
    return {name: Placement(name in on_host, decoding) for name in sources}


def encoder_bytes(sizes: Mapping[str, int]) -> int:
    """Return how many of the bytes of a base model's parts those take that read its prompts."""
    return sum(size for part, size in sizes.items() if part.startswith("text_"))


def encoders_on_host(parts: Mapping[str, Mapping[str, int]], free: int) -> set[str]:
    """Return the base models whose text encoders stay in host memory: the largest, as few as let the rest fit."""
    over = sum(sum(sizes.values()) for sizes in parts.values()) + ROOM - free
    on_host = set[str]()
    for name in sorted(parts, key=lambda name: encoder_bytes(parts[name]), reverse=True):
        if over > 0 and encoder_bytes(parts[name]):
            on_host.add(name)
            over -= encoder_bytes(parts[name])
    return on_host


def decoding_bytes(left: int, adapters: int) -> int:
    """Return half of what weights and adapters leave of a device's memory; the other half is for steps."""
    return max((left - (adapters or left // SPARE_PART)) // 2, 1)


def _gigabytes(*sizes: int) -> str:
    return f"{sum(sizes) / GB:.2f} GB"


def shown_bytes(*numbers: int) -> str:
    """Return `3.1 of 6.9 GB`, in megabytes where the last number is less than a tenth of a gigabyte."""
    unit, length = ("GB", GB) if numbers[-1] >= GB / 10 else ("MB", GB / 1000)
    return " of ".join(f"{number / length:.1f}" for number in numbers) + f" {unit}"


def part_bytes(source: Source, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each part's weights as they are loaded in `dtype`; nothing for files that are missing."""
    sizes: dict[str, int] = {}
    given, is_transformer = _given_parts(source), "transformer" in _described_parts(source)
    for file, part in weight_files(source):
        for name, kind, shape in _tensors(file):
            of = part or part_in_file(name, of_transformer=is_transformer)[0] or "weights"
            if (part or of not in given) and not _UNUSED.match(name):
                item = 4 if of == "vae" and dtype == torch.float16 else dtype.itemsize  # most VAEs overflow in float16
                counts = shape if len(shape) < 5 else (*shape[:2], *shape[3:])  # `qwen_vae.py` takes a slice of those
                sizes[of] = sizes.get(of, 0) + _INTEGER_BYTES.get(kind, item) * math.prod(counts)
    return sizes


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, type and shape of a file's tensors; the loader names what is wrong with one that has no header."""
    with suppress(OSError, SafetensorError):
        opened: Any = safe_open(file, framework="np")
        with opened as weights:
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_slice(name)
                yield name, tensor.get_dtype(), tensor.get_shape()


def weight_files(source: Source) -> Iterator[tuple[Path, str]]:
    """Yield the files that loading a base model reads, each with the part it holds, or an empty name if with several.

    What is missing is named by the loader.
    """
    path, given = as_checkpoint(source).path, _given_parts(source)
    for part, place in given.items():
        folder = place / part if (place / part).is_dir() else place
        files = [place] if place.suffix == ".safetensors" else _chosen(folder.parent, [folder.name])
        yield from ((file, part) for file in files)
    parts = [part for part in _described_parts(source) if part not in given]
    if path.suffix == ".safetensors":
        yield path, ""
        path = _folder(source)
        if "transformer" in parts:  # what such a file does not hold is read from its config's folder
            held = {part_in_file(name, of_transformer=True)[0] for name, *_ in _tensors(as_checkpoint(source).path)}
            parts = [part for part in parts if part not in held]
        else:
            parts = []
    yield from ((file, file.parent.name) for file in _chosen(path, parts))


def _folder(source: Source) -> Path:
    """Return the folder that describes a base model."""
    path, config = as_checkpoint(source)[:2]
    return config or (path.with_suffix("") if path.suffix == ".safetensors" else path)


def _described_parts(source: Source) -> list[str]:
    return [name for name, of in index_of(_folder(source)).items() if isinstance(of, list) and name not in UNNEEDED]


def _given_parts(source: Source) -> dict[str, Path]:
    """Return the parts that come from another place than the base model's own."""
    checkpoint, index = as_checkpoint(source), index_of(_folder(source))
    given = {} if checkpoint.vae is None else {"vae": checkpoint.vae}
    if (place := checkpoint.text_encoder) is not None:
        given |= dict.fromkeys(named_parts(place, "text_encoder", index), place)
    return given


def _chosen(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the parts' files of the variant that is read; where there are shards and a whole file, the shards."""
    files = {part: sorted((folder / part).glob("*.safetensors")) for part in parts}
    variant = variant_of(folder, [part for part in parts if files[part]])
    for found in files.values():
        plain = [file for file in found if "." not in file.stem]
        chosen = [file for file in found if variant is not None and f".{variant}" in file.stem] or plain
        yield from [file for file in chosen if "-of-" in file.stem] or chosen


@contextmanager
def watched(name: str, source: Source, tell: Callable[[str], None]) -> Generator[None]:
    """Tell, while the block loads a base model, how many bytes of its files it has taken into memory."""
    sizes = {str(file.resolve()): file.stat().st_size for file, _ in weight_files(source) if file.is_file()}
    taken: dict[str, int] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            mapped = _mapped_bytes(sizes)
            for file in sizes.keys() & (mapped.keys() | taken.keys()):  # what is no longer mapped is converted
                taken[file] = max(taken.get(file, 0), mapped.get(file, sizes[file]))
            tell(f"loading {name}: {shown_bytes(sum(taken.values()), sum(sizes.values()))}")

    thread = threading.Thread(target=watch, name="watch-loading")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _mapped_bytes(files: Collection[str]) -> dict[str, int]:
    """Return how many bytes of files that this process maps, as loaders of safetensors do, it has read through the map."""
    with suppress(psutil.Error, OSError, AttributeError):  # macOS does not tell, and a container may not
        return {each.path: each.rss for each in psutil.Process().memory_maps() if each.path in files}
    return {}
