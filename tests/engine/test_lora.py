"""Slot layers against PEFT, one adapter at a time: linear, convolution, DoRA; what a slot held is forgotten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from serve_app.engine.layers import SlotConv, wrap_layers
from serve_app.engine.lora import LayerWeights, ModuleWeights, SlotBank, ranks_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.point = nn.Conv2d(8, 6, 1)
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.point(torch.relu(self.conv(x))).flatten(2).transpose(1, 2))


def banked(slots: int = 4) -> tuple[Net, SlotBank]:
    net = Net().eval()
    return net, SlotBank(wrap_layers(net), slots)


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


def by_peft(weights: LayerWeights, strength: float) -> Callable[[Tensor], Tensor]:
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
                layer.weight.add_((part.up @ part.down.flatten(1)).view(layer.weight.shape) * part.scale * strength)
            continue
        layer.lora_A["default"].weight.data = part.down
        layer.lora_B["default"].weight.data = part.up.view(*part.up.shape, 1, 1) if name != "linear" else part.up
        layer.scaling["default"] = part.scale * strength
        if dora:
            layer.lora_magnitude_vector["default"].weight.data = part.magnitude
    return net.eval()


def place(bank: SlotBank, slot: int, weights: LayerWeights) -> None:
    if not bank.layout.covers(ranks_of(weights)):
        bank.change_layout(bank.grown(ranks_of(weights)), bank.slots)
    row = bank.pack(weights)
    assert row is not None
    bank.put(slot, row)


@torch.inference_mode()
def test_rows_with_different_ranks_strengths_and_none_match_peft_one_at_a_time() -> None:
    net, bank = banked()
    adapters = {1: random_weights(3, 1), 2: random_weights(20, 2), 3: random_weights(7, 3, dora=True)}
    for slot, weights in adapters.items():
        place(bank, slot, weights)  # slot 2 makes the bank grow in rank while slot 1 is held
    slots, strengths = [2, 2, 0, 1, 3], [0.7, 0.7, 0.0, 1.3, 0.4]
    x = torch.randn(5, 4, 6, 6)
    bank.bind(slots, strengths)
    y = net(x)
    for row, (slot, strength) in enumerate(zip(slots, strengths, strict=True)):
        expected = by_peft(adapters[slot], strength)(x[row : row + 1]) if slot else Net().eval()(x[row : row + 1])
        assert torch.allclose(y[row], expected[0], rtol=1e-5, atol=1e-4), row


@torch.inference_mode()
def test_a_cleared_slot_adds_nothing() -> None:
    net, bank = banked()
    place(bank, 1, random_weights(4, 1))
    bank.clear(1)
    bank.bind([1], [1.0])
    x = torch.randn(1, 4, 6, 6)
    assert torch.allclose(net(x), Net().eval()(x), atol=1e-6)


@torch.inference_mode()
def test_a_slot_filled_again_wears_only_the_new_adapter() -> None:
    net, bank = banked()
    place(bank, 1, random_weights(20, 1))
    only_linear = {"linear": random_weights(3, 2)["linear"]}
    place(bank, 1, only_linear)
    fresh_net, fresh = banked()
    place(fresh, 1, only_linear)
    x = torch.randn(1, 4, 6, 6)
    for one in (bank, fresh):
        one.bind([1], [1.0])
    assert torch.allclose(net(x), fresh_net(x), atol=1e-6)


def test_a_row_packed_for_another_layout_is_refused() -> None:
    _, bank = banked()
    small = random_weights(3, 1)
    bank.change_layout(bank.grown(ranks_of(small)), bank.slots)
    row = bank.pack(small)
    assert row is not None
    bank.change_layout(bank.grown(ranks_of(random_weights(40, 2))), bank.slots)
    with pytest.raises(AssertionError, match="layout"):
        bank.put(1, row)


def test_layers_outside_the_layout_are_not_packed() -> None:
    _, bank = banked()
    assert bank.pack(random_weights(3, 1)) is None


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
    assert isinstance(layer, SlotConv)
    assert layer.folds
    layer.folds = folds
    bank = SlotBank(layers, 2)
    down, up = torch.randn(5, 4, *base.kernel_size), torch.randn(8, 5)
    place(bank, 1, {"0": ModuleWeights(down, up, 0.5)})
    x = torch.randn(2, 4, 9, 10).to(memory_format=torch.channels_last)
    bank.bind([1, 0], [0.8, 0.0])
    change = nn.functional.conv2d(x[:1], down, None, base.stride, base.padding, base.dilation)  # pyright: ignore[reportArgumentType]
    expected = base(x)
    expected[:1] += 0.4 * nn.functional.conv2d(change, up[:, :, None, None])
    assert torch.allclose(net(x), expected, rtol=1e-5, atol=1e-5)
