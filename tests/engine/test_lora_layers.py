"""LoRA layers match PEFT, one adapter at a time: linear, convolution, DoRA, and a reused slot."""

import copy
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from serve_app.engine.adapter_slots import NO_SLOT, AdapterSlots, LayerWeights, ModuleWeights
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.lora_layers import Factors, LoRAConv, wrap_layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.point = nn.Conv2d(8, 6, 1)
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.point(torch.relu(self.conv(x))).flatten(2).transpose(1, 2))


def new_store() -> AdapterStore:
    return AdapterStore(torch.device("cpu"), torch.float32, 2**20)


def net_with_slots(slots: int = 4) -> tuple[Net, AdapterSlots]:
    net = Net().eval()
    return net, AdapterSlots([wrap_layers(net)], slots, new_store())


def random_weights(rank: int, seed: int, *, dora: bool = False) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv": (8, 4, 3, 3), "point": (6, 8, 1, 1), "linear": (5, 6)}
    return {
        name: ModuleWeights(
            torch.randn(rank, *shape[1:], generator=generator),
            torch.randn(shape[0], rank, generator=generator),
            0.5,
            torch.rand(shape[0], generator=generator) + 0.5 if dora and name == "linear" else None,
        )
        for name, shape in shapes.items()
    }


def by_peft(weights: LayerWeights, scale: float) -> Callable[[Tensor], Tensor]:
    rank = next(iter(weights.values())).rank
    dora = weights["linear"].magnitude is not None
    net = Net().eval()
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["conv", "point", "linear"])
    inject_adapter_in_model(config, net)
    if dora:
        net = Net().eval()
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=["linear"], use_dora=True), net)
    for name, part in weights.items():
        layer: Any = net.get_submodule(name)
        if dora and name != "linear":
            with torch.no_grad():
                layer.weight.add_((part.up @ part.down.flatten(1)).view(layer.weight.shape) * part.scaling * scale)
            continue
        layer.lora_A["default"].weight.data = part.down
        layer.lora_B["default"].weight.data = part.up.view(*part.up.shape, 1, 1) if name != "linear" else part.up
        layer.scaling["default"] = part.scaling * scale
        if dora:
            layer.lora_magnitude_vector["default"].weight.data = part.magnitude
    return net.eval()


def place(adapter_slots: AdapterSlots, slot: int, weights: LayerWeights) -> None:
    row = adapter_slots.pack(weights)
    start = adapter_slots.store.take(len(row.lines))
    assert start is not None
    adapter_slots.set(slot, row, start)


@torch.inference_mode()
def test_rows_with_different_ranks_strengths_and_none_match_peft_one_at_a_time() -> None:
    net, adapter_slots = net_with_slots()
    adapters = {1: random_weights(3, 1), 2: random_weights(20, 2), 3: random_weights(7, 3, dora=True)}
    for slot, weights in adapters.items():
        place(adapter_slots, slot, weights)  # slot 2 makes the adapter_slots grow in rank while slot 1 is held
    slots, scales = [2, 2, 0, 1, 3], [0.7, 0.7, 0.0, 1.3, 0.4]
    x = torch.randn(5, 4, 6, 6)
    adapter_slots.bind(slots, scales)
    y = net(x)
    for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
        expected = by_peft(adapters[slot], scale)(x[row : row + 1]) if slot else Net().eval()(x[row : row + 1])
        assert torch.allclose(y[row], expected[0], rtol=1e-5, atol=1e-4), row


@pytest.mark.parametrize("kernel", [False, True], ids=["gathered", "read in slots"])
@torch.inference_mode()
def test_factors_of_any_sizes_are_applied_beside_each_other_and_beside_none(kernel: bool) -> None:
    """Two adapters have factors of other sizes in one layer, the third a LoRA there as well, the fourth a LoRA alone."""
    base = nn.Linear(12, 8)
    layers = wrap_layers(net := nn.Sequential(nn.Sequential(base)))
    adapter_slots = AdapterSlots([layers], 6, new_store(), add_lora=ReadSlots() if kernel else None)
    none, lora = (torch.zeros(0, 12), torch.zeros(8, 0)), (torch.randn(3, 12), torch.randn(8, 3))
    first, second = Factors(torch.randn(4, 3), torch.randn(2, 4)), Factors(torch.randn(3, 2), torch.randn(4, 6), 2)
    adapters = [
        ModuleWeights(*none, 0.5, factors=first),
        ModuleWeights(*none, 1.0, factors=second),
        ModuleWeights(*(none if kernel else lora), 0.7, factors=first._replace(outer=second.outer.new_ones(4, 3))),
        ModuleWeights(*(none if kernel else lora), 1.0),
    ]
    for slot, weights in enumerate(adapters, 1):
        place(adapter_slots, slot, {"0.0": weights})
    slots, scales = [1, 0, 2, 4, 3, 1], [0.5, 0.0, 1.2, -1.0, 1.0, 2.0]
    x = torch.randn(6, 5, 12)
    adapter_slots.bind(slots, scales)
    y, plain = net(x).clone(), base(x)
    for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
        change = adapters[slot - 1].change * scale if slot else torch.zeros(8, 12)
        assert torch.allclose(y[row], plain[row] + x[row] @ change.T, atol=1e-5), row
    adapter_slots.bind([4], [1.0])
    assert layers["0.0"].change is None or not layers["0.0"].change.factors, "a batch without them pays for none"


@torch.inference_mode()
def test_a_slot_whose_adapter_gave_way_to_one_of_other_components_adds_nothing() -> None:
    net, adapter_slots = net_with_slots()
    place(adapter_slots, 1, random_weights(4, 1))
    place(adapter_slots, 1, {})
    adapter_slots.bind([1], [1.0])
    x = torch.randn(1, 4, 6, 6)
    assert torch.allclose(net(x), Net().eval()(x), atol=1e-6)


@torch.inference_mode()
def test_a_slot_filled_again_applies_only_the_new_adapter() -> None:
    net, adapter_slots = net_with_slots()
    place(adapter_slots, 1, random_weights(20, 1))
    only_linear = {"linear": random_weights(3, 2)["linear"]}
    place(adapter_slots, 1, only_linear)
    fresh_net, fresh = net_with_slots()
    place(fresh, 1, only_linear)
    x = torch.randn(1, 4, 6, 6)
    for one in (adapter_slots, fresh):
        one.bind([1], [1.0])
    assert torch.allclose(net(x), fresh_net(x), atol=1e-6)


@torch.inference_mode()
def test_each_lane_keeps_what_was_bound_to_it() -> None:
    nets = [Net().eval(), Net().eval()]
    adapter_slots = AdapterSlots([wrap_layers(net) for net in nets], 4, new_store())
    adapters = {1: random_weights(3, 1), 2: random_weights(20, 2)}
    for slot, weights in adapters.items():
        place(adapter_slots, slot, weights)
    x = torch.randn(2, 4, 6, 6)
    adapter_slots.bind([1, 0], [0.7, 0.0])
    adapter_slots.bind([2, 1], [0.5, 0.7], lane=1)
    adapter_slots.bind([1, 0], [0.7, 0.0])
    for net, slots in zip(nets, ([1, 0], [2, 1]), strict=True):
        for row, slot in enumerate(slots):
            expected = (
                by_peft(adapters[slot], {1: 0.7, 2: 0.5}[slot])(x[row : row + 1]) if slot else Net().eval()(x[1:])
            )
            assert torch.allclose(net(x)[row], expected[0], rtol=1e-5, atol=1e-4), (slots, row)
    place(adapter_slots, 2, adapters[1])
    adapter_slots.bind([2, 1], [0.7, 0.7], lane=1)
    assert torch.allclose(nets[1](x)[0], nets[0](x)[0], atol=1e-6), "a slot that is filled again reaches every lane"


class ReadSlots:
    """Stands where a kernel does that reads slots itself, and keeps the addresses that it was given."""

    def __init__(self) -> None:
        self.addresses: set[tuple[int, ...]] = set()

    def __call__(self, *given: Any) -> None:
        self.addresses.add(tuple(each.data_ptr() for each in given[:5]))


@torch.inference_mode()
def test_memory_stays_where_it_is_over_a_thousand_compositions_of_a_batch() -> None:
    """Rows join and leave, and adapters change in their slots. A captured graph reads what lay there before."""
    draw, rows, kernel = random.Random(0), 16, ReadSlots()
    net = Net().eval()
    layers = wrap_layers(net)
    adapter_slots = AdapterSlots([layers], 8, new_store(), add_lora=kernel)
    starts: dict[int, int] = {}

    def fill(slot: int, weights: LayerWeights) -> None:
        if slot in starts:
            adapter_slots.store.free(starts.pop(slot))
        row = adapter_slots.pack(weights)
        start = adapter_slots.store.take(max(1, len(row.lines)))
        assert start is not None
        adapter_slots.set(slot, row, start)
        starts[slot] = start

    fill(1, random_weights(40, 0, dora=True))
    batch = [(1, 1.0)] * rows
    adapter_slots.bind(*zip(*batch, strict=True))  # the widest batch comes first
    x = torch.randn(1, 4, 6, 6)
    lie: dict[Hashable, list[int]] = {}
    storages: set[int] = set()
    for i in range(1000):
        if i % 4 == 0:
            weights = random_weights(draw.choice((3, 8, 20, 40)), i, dora=draw.random() < 0.3)
            fill(draw.randrange(1, 8), {name: weights[name] for name in weights if draw.random() < 0.7})
        del batch[: draw.randrange(len(batch) + 1)]
        joining = draw.randint(0 if batch else 1, rows - len(batch))
        batch += [(draw.choice([NO_SLOT, *starts]), draw.random()) for _ in range(joining)]
        adapter_slots.bind(*zip(*batch, strict=True))
        views = [view for layer in layers.values() if layer.change for view in layer.change[:5] if view is not None]
        key = adapter_slots.key()
        assert lie.setdefault(key, [view.data_ptr() for view in views]) == [view.data_ptr() for view in views], key
        storages |= {view.untyped_storage().data_ptr() for view in views}
        net(x.expand(len(batch), -1, -1, -1))
    assert len(lie) > 64, "more layouts and row counts than are kept at once"
    assert len(storages) == len(kernel.addresses) == 1


@pytest.mark.parametrize("folds", [True, False], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize(
    "sliding",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 0},
        {"kernel_size": (3, 5), "padding": (1, 2)},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 1, "padding": 0, "stride": 2},
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_convolution_of_any_kernel_takes_an_adapter_as_two_convolutions_would(
    sliding: dict[str, Any], folds: bool
) -> None:
    base = nn.Conv2d(4, 8, **sliding)
    net = nn.Sequential(base)
    layers = wrap_layers(net)
    layer = layers["0"]
    assert isinstance(layer, LoRAConv)
    assert layer.folds
    layer.folds = folds
    adapter_slots = AdapterSlots([layers], 2, new_store())
    down, up = torch.randn(5, 4, *base.kernel_size), torch.randn(8, 5)
    place(adapter_slots, 1, {"0": ModuleWeights(down, up, 0.5)})
    x = torch.randn(2, 4, 9, 10).to(memory_format=torch.channels_last)
    adapter_slots.bind([1, 0], [0.8, 0.0])
    change = torch.conv2d(x[:1], down, None, base.stride, sliding["padding"], base.dilation)
    expected = base(x)
    expected[:1] += 0.4 * nn.functional.conv2d(change, up[:, :, None, None])
    assert torch.allclose(net(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["magnitude", "input_slope"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 5), nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(6, 5, 1)], ids=["linear", "conv", "pointwise"]
)
@torch.inference_mode()
def test_a_row_beside_one_with_a_gain_keeps_every_bit(layer: nn.Linear | nn.Conv2d, bias: bool, side: str) -> None:
    base = copy.deepcopy(layer)
    torch.nn.init.normal_(base.weight)
    base.register_parameter("bias", nn.Parameter(torch.randn(5)) if bias else None)
    net = nn.Sequential(base)
    adapter_slots = AdapterSlots([wrap_layers(net)], 3, new_store())
    shape = base.weight.shape
    plain = ModuleWeights(torch.randn(4, *shape[1:]), torch.randn(5, 4), 0.5)
    place(adapter_slots, 1, {"0": plain})
    place(adapter_slots, 2, {"0": plain._replace(**{side: torch.rand(5 if side == "magnitude" else 6) + 0.5})})
    x = torch.randn(512, 6) if isinstance(base, nn.Linear) else torch.randn(512, 6, 4, 4)
    x = x if side == "magnitude" or x.dim() == 2 else x.to(memory_format=torch.channels_last)
    beside = [1, 0, 2, 2] * 128
    adapter_slots.bind(beside, [0.7] * 512)
    with_gains = net(x).clone()
    adapter_slots.bind([slot if slot == 1 else 0 for slot in beside], [0.7] * 512)
    without = net(x)
    for slot in (0, 1):
        rows = [i for i, one in enumerate(beside) if one == slot]
        assert torch.equal(with_gains[rows], without[rows])
        assert torch.equal(with_gains[rows].signbit(), without[rows].signbit())
    assert not torch.equal(with_gains, without)
