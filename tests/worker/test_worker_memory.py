"""A card's memory by use adds up to the card, whatever its counters say."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.domain.metrics import MemoryUse
from serve_app.engine import Engine, EngineOptions
from serve_app.worker.memory import CardMemory, card_uses, memory_parts
from tests.support import POCKET

GIB = 2**30
sizes = partial(st.integers, 0, 80 * GIB)


def test_a_card_is_divided_among_its_uses() -> None:
    card = CardMemory(total=80 * GIB, free=50 * GIB, reserved=20 * GIB, allocated=15 * GIB)
    assert card_uses(card, weights=6 * GIB, adapters=4 * GIB) == {
        MemoryUse.WEIGHTS: 6 * GIB,
        MemoryUse.ADAPTERS: 4 * GIB,
        MemoryUse.ACTIVATIONS: 5 * GIB,
        MemoryUse.RESERVED: 5 * GIB,
        MemoryUse.OTHER: 10 * GIB,
        MemoryUse.FREE: 50 * GIB,
    }


@given(st.builds(CardMemory, sizes(), sizes(), sizes(), sizes()), sizes(), sizes())
def test_the_uses_add_up_to_the_card_though_its_counters_disagree(
    card: CardMemory, weights: int, adapters: int
) -> None:
    uses = card_uses(card, weights=weights, adapters=adapters)
    assert sum(uses.values()) == card.total
    assert min(uses.values()) >= 0


@pytest.mark.gpu
def test_a_loaded_engine_is_found_on_its_card() -> None:
    with Engine.load({"pocket": POCKET}, EngineOptions(device="cuda")) as engine:
        weights = engine.base_models["pocket"].weight_bytes
        parts = {part.use: part.size_bytes for part in memory_parts(engine.device, weights=weights)}
        assert 0 < parts[MemoryUse.WEIGHTS] == weights <= torch.cuda.memory_allocated(engine.device)
        del parts[MemoryUse.ADAPTER_CACHE]
        assert sum(parts.values()) == torch.cuda.mem_get_info(engine.device)[1]
