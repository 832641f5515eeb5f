"""Replicas at `max_replicas` fit the pools of nodes in every order, or the check names the rest."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import ConfigError, read_config
from deployments.pools import Pool, ReplicaDemand, shortfalls
from tests.support import ROOT


def generator(replicas: int, gpus: float = 1, **resources: float) -> ReplicaDemand:
    return ReplicaDemand(deployment="generator", replicas=replicas, gpus=gpus, resources=resources)


def upscaler(replicas: int, gpus: float = 0.5, **resources: float) -> ReplicaDemand:
    return ReplicaDemand(deployment="upscaler", replicas=replicas, gpus=gpus, resources=resources)


def cards(nodes: int, gpus: int = 1, **resources: float) -> Pool:
    return Pool(name="cards", nodes=nodes, gpus=gpus, resources=resources)


def test_eight_whole_generators_leave_upscalers_no_card() -> None:
    """Ten GPUs asked of eight once kept an upscale waiting for 115 s."""
    demands = [generator(8), upscaler(4)]
    found = [(short.deployment, short.unplaced) for short in shortfalls(demands, [cards(8)])]
    assert found == [("generator", 4), ("upscaler", 4)]
    assert shortfalls(demands, [cards(8), cards(2)]) != [], "spread out, four upscalers take a card each"
    assert shortfalls(demands, [cards(12)]) == []


def test_a_sum_that_fits_is_not_enough() -> None:
    """Two upscalers of 0.3 on one card leave a generator of 0.7 without one; a place for each on each card keeps it."""
    demands = [generator(4, 0.7), upscaler(4, 0.3)]
    (short,) = shortfalls(demands, [cards(4)])
    assert short.deployment == "generator"
    assert str(short).endswith("find no node of the pools when upscaler scaled first")
    placed = [generator(4, 0.7, generator=1), upscaler(4, 0.3, upscaler=1)]
    assert shortfalls(placed, [cards(4, generator=1, upscaler=1)]) == []


def test_a_fraction_is_taken_from_one_card() -> None:
    """Two halves of two cards are not one card."""
    assert shortfalls([upscaler(3, 0.6)], [cards(1, gpus=2)])[0].unplaced == 1
    assert shortfalls([generator(1, 2)], [cards(2, gpus=1)])[0].unplaced == 1
    assert shortfalls([generator(1, 2)], [cards(1, gpus=2)]) == []


def test_tenths_of_a_card_add_up() -> None:
    """0.7 + 0.3 in binary fractions is not 1."""
    assert shortfalls([generator(1, 0.7), upscaler(1, 0.3)], [cards(1)]) == []
    assert shortfalls([upscaler(10, 0.1)], [cards(1)]) == []


def test_cpus_count_where_they_are_declared() -> None:
    demand = ReplicaDemand(deployment="generator", replicas=2, gpus=1, cpus=4)
    assert shortfalls([demand], [Pool(name="big", nodes=1, gpus=2, cpus=6)])[0].unplaced == 1
    assert shortfalls([demand], [Pool(name="big", nodes=1, gpus=2, cpus=8)]) == []


def test_groups_with_nodes_of_their_own_are_checked_apart() -> None:
    """All orders of eleven deployments would take hours."""
    names = [f"generator.{letter}" for letter in "abcdefghij"]
    demands = [ReplicaDemand(deployment=name, replicas=4, gpus=1, resources={name: 1}) for name in names]
    pools = [Pool(name=name, nodes=4, gpus=1, resources={name: 1}) for name in names]
    assert shortfalls(demands, pools) == []
    demands[3] = replace(demands[3], replicas=5)
    assert [str(short) for short in shortfalls(demands, pools)] == [
        "generator.d: 1 of 5 replicas find no node of the pools"
    ]


def test_without_pools_nothing_is_checked() -> None:
    assert shortfalls([generator(100)], []) == []


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0]))
def test_equal_replicas_fill_each_card_to_the_last_whole_one(nodes: int, replicas: int, gpus: float) -> None:
    capacity = nodes * int(1 / gpus + 1e-9)
    found = shortfalls([upscaler(replicas, gpus)], [cards(nodes)])
    assert sum(short.unplaced for short in found) == max(0, replicas - capacity)


@pytest.mark.parametrize(
    ("change", "deployment"),
    [
        ({"max_replicas: 8": "max_replicas: 9"}, "generator"),
        (
            {"max_replicas: 4\n          upscale_delay_s: 5": "max_replicas: 5\n          upscale_delay_s: 5"},
            "generator.z-image",
        ),
        ({"num_gpus: 0.25": "num_gpus: 0.5"}, "upscaler"),
        ({"resources: {ingress: 1}": "resources: {ingres: 1}"}, "ingress"),
        ({"resources: {upscaler: 4}": "resources: {upscaler: 2}"}, "upscaler"),
        ({"gpus: 1, resources: {generator": "resources: {generator"}, "generator"),
    ],
)
def test_a_production_file_that_asks_too_much_is_refused(
    tmp_path: Path, change: dict[str, str], deployment: str
) -> None:
    text = (ROOT / "configs" / "production.yaml").read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "production.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{deployment}: \d of \d replicas find no node"):
        read_config(path)
