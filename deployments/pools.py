"""Checks that every replica finds a place at `max_replicas` on the declared pools of nodes.

Ray places a fraction of a GPU on one card and never moves it, so a sum that fits is not enough: two upscalers of 0.3 on
one card leave no space there for a generator of 0.7. The check places all replicas in every order of the deployments,
tightly and spread out, and reports the deployments that are left without a node.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import NamedTuple

from pydantic import BaseModel, Field

UNITS_IN_ONE = 10_000
"""Ray counts resources in ten thousandths."""


class Pool(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Nodes of one kind, as many as there may be at most. `cpus` is unlimited when None."""

    name: str
    nodes: int = Field(ge=1)
    gpus: int = Field(default=0, ge=0)
    cpus: float | None = Field(default=None, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources that each node declares (`ray start --resources`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDemand:
    """What a deployment asks for at its largest, per replica."""

    deployment: str
    replicas: int
    gpus: float = 0
    cpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])


class Shortfall(NamedTuple):
    deployment: str
    unplaced: int
    replicas: int
    first: tuple[str, ...]
    """The deployments that scaled before it in the order that left it short."""

    def __str__(self) -> str:
        after = f" when {' and '.join(self.first)} scaled first" if self.first else ""
        return f"{self.deployment}: {self.unplaced} of {self.replicas} replicas find no node of the pools{after}"


def shortfalls(demands: Sequence[ReplicaDemand], pools: Sequence[Pool]) -> list[Shortfall]:
    """Find the worst case of each deployment that can be left without a node; none without pools."""
    if not pools:
        return []
    worst: dict[str, Shortfall] = {}
    orders = (order for rivals in _rivals(demands, pools) for order in permutations(rivals))
    for order, tight in product(orders, (True, False)):
        for short in _place(order, pools, tight=tight):
            known = worst.get(short.deployment)
            if known is None or (short.unplaced, -len(short.first)) > (known.unplaced, -len(known.first)):
                worst[short.deployment] = short
    return [worst[demand.deployment] for demand in demands if demand.deployment in worst]


def _rivals(demands: Sequence[ReplicaDemand], pools: Sequence[Pool]) -> list[list[ReplicaDemand]]:
    """Part the deployments into those that may meet on a node: the order among others changes nothing.

    Groups of base models on nodes of their own would otherwise multiply the orders: seven deployments have 5,040.
    """
    parts: list[tuple[list[ReplicaDemand], set[int]]] = []
    for demand in demands:
        here, places = [demand], {number for number, pool in enumerate(pools) if fits_alone(demand, pool)}
        for part in [part for part in parts if part[1] & places]:
            parts.remove(part)
            here, places = [*part[0], *here], part[1] | places
        parts.append((here, places))
    return [rivals for rivals, _ in parts]


def fits_alone(demand: ReplicaDemand, pool: Pool) -> bool:
    """Whether an empty node of the pool has space for one replica."""
    return _Node(pool).fits(demand)


def _place(order: Sequence[ReplicaDemand], pools: Sequence[Pool], *, tight: bool) -> Iterator[Shortfall]:
    nodes = [_Node(pool) for pool in pools for _ in range(pool.nodes)]
    for position, demand in enumerate(order):
        unplaced = sum(not _take(demand, nodes, tight=tight) for _ in range(demand.replicas))
        if unplaced:
            first = tuple(before.deployment for before in order[:position])
            yield Shortfall(demand.deployment, unplaced, demand.replicas, first)


def _take(demand: ReplicaDemand, nodes: "Sequence[_Node]", *, tight: bool) -> bool:
    fitting = [node for node in nodes if node.fits(demand)]
    if not fitting:
        return False
    (min if tight else max)(fitting, key=lambda node: node.free_gpu).take(demand, tight=tight)
    return True


class _Node:
    """The cards, CPUs and resources of one node that no replica takes yet, in ten thousandths."""

    def __init__(self, pool: Pool) -> None:
        self.cards = [UNITS_IN_ONE] * pool.gpus
        self.cpus = None if pool.cpus is None else _units(pool.cpus)
        self.resources = {name: _units(amount) for name, amount in pool.resources.items()}

    @property
    def free_gpu(self) -> int:
        return sum(self.cards)

    def fits(self, demand: ReplicaDemand) -> bool:
        enough_cpus = self.cpus is None or self.cpus >= _units(demand.cpus)
        named = all(self.resources.get(name, 0) >= _units(amount) for name, amount in demand.resources.items())
        return enough_cpus and named and len(self._cards_for(demand)) >= _cards(demand)

    def take(self, demand: ReplicaDemand, *, tight: bool) -> None:
        if self.cpus is not None:
            self.cpus -= _units(demand.cpus)
        for name, amount in demand.resources.items():
            self.resources[name] -= _units(amount)
        chosen = sorted(self._cards_for(demand), key=lambda card: self.cards[card], reverse=not tight)
        for card in chosen[: _cards(demand)]:
            self.cards[card] -= _share(demand)

    def _cards_for(self, demand: ReplicaDemand) -> list[int]:
        return [card for card, free in enumerate(self.cards) if free >= _share(demand)]


def _cards(demand: ReplicaDemand) -> int:
    """How many cards a replica touches: one for a fraction, else as many as it asks for."""
    return 0 if demand.gpus == 0 else max(1, int(demand.gpus))


def _share(demand: ReplicaDemand) -> int:
    """How much a replica takes of each card that it touches."""
    return _units(min(demand.gpus, 1))


def _units(amount: float) -> int:
    return round(amount * UNITS_IN_ONE)
