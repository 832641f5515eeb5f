"""A device named `sim`, which needs no GPU: the engine runs on it unchanged, and what it asks of a device is recorded.

Tensors on it are real ones on the CPU, or hollow ones (`meta`) that have shapes and no numbers, so that a model of any
size fits. As on a GPU, an operation that gets tensors of two devices raises, and each operation that would launch a
kernel, each copy and each wait for the device is counted. It is torch's own private backend, for this process.
"""

import cProfile
import functools
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "sim"
HOST, META = torch.device("cpu"), torch.device("meta")
PRODUCT = "/serve_app/"
NO_KERNEL = frozenset(
    (
        "_local_scalar_dense", "_unsafe_view", "detach_", "empty", "empty_like", "empty_strided", "new_empty",
        "new_empty_strided", "resize_", "set_",
    )
)  # fmt: skip
"""Operations without a kernel, besides those whose result is a view of what they get."""
WAITS = frozenset(("_local_scalar_dense", "equal", "nonzero", "masked_select"))
"""Operations whose result the host needs before it can go on."""
TAKES_HOST = frozenset(("index", "index_put_", "_index_put_impl_"))
"""Operations on the device that take indices of the host, and upload them."""
WHOLE = frozenset(("rms_norm", "scaled_dot_product_attention", "upsample_nearest2d"))
"""Operations that torch can take apart, and that a GPU computes by one kernel."""


@dataclass
class Record:
    """What was asked of the device while this was the record."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that launch kernels, by name; each counts once, although a few take two or three kernels."""
    uploads: list[str] = field(default_factory=list)
    """Copies from the host, by the line that asked for them."""
    waits: list[str] = field(default_factory=list)
    """Reads of the device's numbers, and copies that wait: each stops the host until the device has caught up."""
    reads: list[tuple[Any, int]] = field(default_factory=list)
    """Storage and offset of everything that operations read and that none of this record's had written, in order."""

    def __post_init__(self) -> None:
        self._written: dict[int, Any] = {}
        """Storages by their address, kept so that none is given to another meanwhile."""

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def launched(self, name: str, read: Iterable["Simulated"], wrote: Iterable[Tensor]) -> None:
        self.launches[name] += 1
        for tensor in read:
            storage = tensor.raw.untyped_storage()
            if _address(storage) not in self._written:
                self.reads.append((storage, int(tensor.raw.storage_offset())))
        for raw in wrote:
            storage = raw.untyped_storage()
            self._written[_address(storage)] = storage


def _address(storage: Any) -> int:
    """Return what tells storages apart, hollow ones too."""
    return storage._cdata


_is_hollow = False
_records: list[Record] = []


@contextmanager
def recorded() -> Generator[Record]:
    """Record what this process asks of the device."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


_memory = (2**40, 2**40)


@contextmanager
def memory(*, free: int, total: int) -> Generator[None]:
    """Let the device have this many bytes."""
    global _memory
    before, _memory = _memory, (free, total)
    yield
    _memory = before


class CountedCalls:
    """Counts this thread's calls of the product's Python functions inside its `with`, by file and name."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def __enter__(self) -> "CountedCalls":
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def pause(self) -> None:
        self._profile.disable()

    def resume(self) -> None:
        self._profile.enable()

    def found(self) -> Counter[str]:
        calls = Counter[str]()
        for entry in self._profile.getstats():
            if isinstance(entry.code, str) or entry.code.co_name == "<genexpr>":
                continue  # a generator expression is entered for each of its items
            _, is_product, file = entry.code.co_filename.rpartition(PRODUCT)
            if is_product:
                calls[f"{file}:{entry.code.co_name}"] += entry.callcount
        return calls


@contextmanager
def hollow() -> Generator[None]:
    """Make tensors of the device without numbers. What the host reads of them is zeros, and true."""
    global _is_hollow
    _is_hollow = True
    try:
        yield
    finally:
        _is_hollow = False


class Simulated(Tensor):
    """A tensor of the device."""

    raw: Tensor

    @staticmethod
    def __new__(cls: "type[Simulated]", raw: Tensor) -> "Simulated":
        made: Simulated = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return what views of one tensor share, as on any device."""
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Operation(NamedTuple):
    name: str
    is_composite: bool
    launches: bool


@functools.cache
def _operation(func: Any) -> _Operation:
    name: str = func._overloadpacket.__name__
    is_composite = func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(  # pyright: ignore
        func.name(), "CompositeImplicitAutograd"
    )
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return _Operation(name, is_composite and name not in WHOLE, not is_view and name not in NO_KERNEL)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    name, is_composite, _ = _operation(func)
    if name == "dropout":
        return args[0]  # the engine never trains
    if is_composite:
        return func.decompose(*args, **kwargs)
    with torch.inference_mode(False):  # a tensor that is made in inference mode cannot have views
        return _copy(func, args, kwargs) if name in ("copy_", "_to_copy") else _run(func, args, kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = _operation(func).name
    tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, Simulated)]
    from_host = [tensor for tensor in tensors if not isinstance(tensor, Simulated) and tensor.dim()]
    if ours and from_host:
        if name not in TAKES_HOST:
            raise RuntimeError(f"{func}: expected all tensors to be on one device, found {NAME} and cpu ({_where()})")
        _record_copy("cpu", NAME, is_async=False)
    if name in WAITS:
        for record in _records:
            record.waits.append(f"{name} {_where()}")
        if _is_hollow:
            return True
    options = {key: _raw_device() if key == "device" else _bare(value) for key, value in kwargs.items()}
    answer = func(*(_bare(value) for value in args), **options)
    if name == "scaled_dot_product_attention":  # a GPU's kernels give their result the layout of the queries
        answer = torch.empty_like(ours[0].raw).copy_(answer)
    return _answered(func, ours, answer)


def _answered(func: Any, ours: Sequence[Simulated], answer: Any) -> Any:
    """Record the operation; one in place hands back the very tensor that it got."""
    same = {id(tensor.raw): tensor for tensor in ours}
    name, _, launches = _operation(func)
    if launches:
        wrote = [raw for raw in _leaves((answer,)) if isinstance(raw, Tensor) and id(raw) not in same]
        for record in _records:
            record.launched(name, ours, wrote)

    def wrapped(raw: Any) -> Any:
        if not isinstance(raw, Tensor):
            return raw
        return same[id(raw)] if id(raw) in same else Simulated(raw)

    return type(answer)(map(wrapped, answer)) if isinstance(answer, (list, tuple)) else wrapped(answer)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy within the device, to it or from it."""
    name = _operation(func).name
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    if target.type != source.device.type:
        is_async = target.type == NAME and (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        _record_copy(source.device.type, target.type, is_async=is_async)
    raw = _bare(source)
    if target.type != NAME and _is_hollow:
        raw = torch.zeros_like(raw, device=HOST)
    if name == "copy_":
        answer = _bare(args[0]).copy_(raw)
        return _answered(func, [one for one in args[:2] if isinstance(one, Simulated)], answer)
    options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
    if target.type != NAME:
        return func(raw, device=HOST, **options)
    return _answered(
        func, [source] if isinstance(source, Simulated) else [], func(raw, device=_raw_device(), **options)
    )


def _record_copy(source: str, target: str, *, is_async: bool) -> None:
    what = f"{source} to {target} {_where()}"
    for record in _records:
        if target == NAME:
            record.uploads.append(what)
        if not is_async:
            record.waits.append(what)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _bare(value: Any) -> Any:
    if isinstance(value, Simulated):
        return value.raw
    return [_bare(one) for one in value] if isinstance(value, (list, tuple)) else value


def _raw_device() -> torch.device:
    return META if _is_hollow else HOST


def _where() -> str:
    """Return the line of the product that asked for what is being recorded."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition(PRODUCT)
        if found:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the product"


@functools.cache
def register() -> None:
    """Make `sim` a device of torch, in this process and for good."""
    setup: Any = backend_registration._setup_privateuseone_for_python_backend  # pyright: ignore[reportPrivateUsage]
    setup(NAME)
    getattr(torch, NAME).mem_get_info = lambda _device: _memory
    for key, made in (("empty.memory_format", _empty), ("empty_strided", _empty_strided), ("_copy_from", _copy_from)):
        _library("aten").impl(key, made, "PrivateUse1")
    _library("_").fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), dispatch_key="PrivateUse1")


@functools.cache
def _library(namespace: str) -> Any:
    """Return a library that is kept, since what it registered goes with it."""
    return torch.library.Library(namespace, "IMPL")


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Simulated:
    order = memory_format or torch.contiguous_format
    with torch.inference_mode(False):
        return Simulated(torch.empty(size, dtype=dtype, device=_raw_device(), memory_format=order))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Simulated:
    with torch.inference_mode(False):
        return Simulated(torch.empty_strided(size, stride, dtype=dtype, device=_raw_device()))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Any:
    return _compute(torch.ops.aten.copy_.default, (to, source, non_blocking), {})
