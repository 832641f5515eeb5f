"""Runs forward passes side by side, each on a thread of its own with its share of this process's CPU threads.

Two passes of one thread each, with half of a batch's rows, take less time than one pass whose operators share two
threads: few operators are large enough to be worth dividing. Each pass needs module objects of its own, because
adapters are bound to them; the weights are the same tensors (`Component.another`).
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor, nn

from serve_app.engine.device import torch_device
from serve_app.engine.lora_layers import LoRALayer
from serve_app.engine_options import EngineOptions


class Component(NamedTuple):
    """A module of a base model whose layers adapters can change."""

    module: nn.Module
    layers: Mapping[str, LoRALayer]
    """The LoRA layers by the module's own names."""
    aliases: Mapping[str, str]
    """Further names that adapter files give a layer → its own name."""
    prefixes: Sequence[str]
    """What adapter files write before a layer's name, such as `lora_unet_` (kohya) or `clip_l.`; the component's own
    name and a dot always may stand there."""
    fused: Mapping[str, Sequence[str]] = {}
    """Names under which adapter files join several layers, whose outputs follow one another → those layers."""

    def another(self) -> "Component":
        """Return the component with module objects of its own, to bind other adapters to, over the same weights."""
        weights = (*self.module.parameters(), *self.module.buffers())
        module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in weights})
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoRALayer)}
        return self._replace(module=module, layers={name: layers[name] for name in self.layers})


def lanes_over(denoiser: Component, options: EngineOptions) -> list[Component]:
    """Return the denoiser once for each pass that may run at the same time: on a CPU, for each of torch's threads.

    A GPU runs one pass at a time.
    """
    count = 1 if torch_device(options).type != "cpu" else min(torch.get_num_threads(), options.max_rows)
    return [denoiser, *(denoiser.another() for _ in range(count - 1))]


class Lanes:
    """The threads of one base model's passes. Only the step thread may use them."""

    def __init__(self, count: int) -> None:
        """Let at most `count` passes run together, each with an equal share of the threads that torch has now."""
        self.count = count
        self._threads = torch.get_num_threads()
        self._share = 0
        self._executors = [ThreadPoolExecutor(1, thread_name_prefix=f"lane-{i}") for i in range(count)]

    def run(self, passes: Sequence[Callable[[], Tensor]], *, single: bool = False) -> Tensor:
        """Return the rows of all passes, computed side by side; one alone runs on this thread, with all its threads.

        `single` gives each one thread. Every pass has ended when this raises the error of one.
        """
        if len(passes) == 1 and not single:
            return passes[0]()
        self._share_threads(1 if single else self._threads // len(passes))
        futures = [
            executor.submit(torch.inference_mode()(each))
            for executor, each in zip(self._executors, passes, strict=False)
        ]
        wait(futures)
        return torch.cat([future.result() for future in futures])

    def _share_threads(self, share: int) -> None:
        """Let the operators of each lane take `share` threads.

        torch keeps the number for each calling thread, and gives a thread that is new the number that any set last.
        """
        if share != self._share:
            wait([executor.submit(take_threads, share) for executor in self._executors])
            torch.set_num_threads(self._threads)
            self._share = share

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown()


def take_threads(count: int) -> None:
    """Let operators that the calling thread runs take `count` threads, whatever others take."""
    torch.get_num_threads()  # at a thread's first question torch sets the process's number, which must not come later
    torch.set_num_threads(count)


def threads_of(count: int, name: str, share: int) -> ThreadPoolExecutor:
    """Return threads, started when they are needed, whose operators take `share` threads each.

    Threads that are started elsewhere later take as many as the calling thread does.
    """
    return ThreadPoolExecutor(count, name, _take_threads_alone, (share, torch.get_num_threads()))


def _take_threads_alone(count: int, others: int) -> None:
    take_threads(count)
    last = threading.Thread(target=torch.set_num_threads, args=(others,))
    last.start()
    last.join()
