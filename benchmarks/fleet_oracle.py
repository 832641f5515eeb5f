"""The fewest replica-hours that could have served known arrivals within the latency goal."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fleet_load import HOUR_MS, Arrival

optimize: Any = importlib.import_module("scipy.optimize")  # to infer their types took pyright a dozen seconds
sparse: Any = importlib.import_module("scipy.sparse")
BIN_MS = 20_000


def oracle_hours(
    arrivals: Sequence[Arrival], end_ms: int, *, image_ms: float, deadline_ms: float, cold_start_ms: float
) -> float:
    """Solve the linear program for the cheapest schedule: replicas n(t), work S(t) done, starts u(t).

    It minimizes the sum of n and of u times a cold start. S rises by at most n, is never ahead of what has arrived, and
    never behind what arrived `deadline_ms` earlier. Every relaxation favors the oracle: replicas may be fractions,
    always work at full width, hold every adapter, are stopped at once, and are ready the moment they are needed; a
    start costs the replica's time all the same. Work is cut into bins, which lets it do a bin's work up to a bin early.
    """
    bins = end_ms // BIN_MS
    ends = (np.arange(bins) + 1) * BIN_MS
    at = np.array([arrival.at for arrival in arrivals])
    work = np.concatenate([[0.0], np.cumsum([arrival.images * image_ms for arrival in arrivals])])
    most = work[np.searchsorted(at, ends, side="right")] / BIN_MS
    least = work[np.searchsorted(at, ends - deadline_ms, side="right")] / BIN_MS
    one = sparse.eye_array(bins)
    rise = one - sparse.diags_array(np.ones(bins - 1), offsets=-1, shape=(bins, bins))
    limits = sparse.vstack([sparse.hstack([-one, rise, 0 * one]), sparse.hstack([rise, 0 * one, -one])])
    solved = optimize.linprog(
        np.concatenate([np.ones(bins), np.zeros(bins), np.full(bins, cold_start_ms / BIN_MS)]),
        A_ub=limits.tocsc(),
        b_ub=np.zeros(2 * bins),
        bounds=np.column_stack(
            [
                np.concatenate([np.zeros(bins), least, np.zeros(bins)]),
                np.concatenate([np.full(bins, np.inf), most, np.full(bins, np.inf)]),
            ]
        ),
        method="highs",
    )
    assert solved.success, solved.message
    return float(solved.fun) * BIN_MS / HOUR_MS
