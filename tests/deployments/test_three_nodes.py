"""Three Ray nodes share one service: one differs, one is killed, GPUs are few, replicas scale to zero."""

from typing import Any

import pytest

from deployments.runtime import runtime_home
from tests.deployments.service import run_program
from tests.deployments.three_nodes import LIMIT_S

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(LIMIT_S + 40)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw: one start of three nodes for all tests of this file."""
    folder = tmp_path_factory.mktemp("nodes")
    return run_program(
        "tests.deployments.three_nodes",
        runtime_home(folder),
        folder / "seen.json",
        limit_s=LIMIT_S + 20,
        ATELIER_DATA_DIR=str(folder / "var"),
    )


def test_the_doctor_names_the_node_whose_pepper_differs(seen: dict[str, Any]) -> None:
    (found,) = seen["doctor"]
    assert found.startswith("cluster pepper: 127.0.0.2 (")
    assert found.endswith("another than on 2 of 3 nodes")


def test_the_doctor_asks_the_nodes_of_the_application_that_serves(seen: dict[str, Any]) -> None:
    found = seen["doctor_serving"]
    assert all(line.startswith("ok ") for line in found.values()), found
    assert found["cluster code"] == "ok the same on 3 nodes"
    assert found["cluster signing keys"] == "ok the same on 1 node", "only the ingress signs"


def test_a_node_that_differs_stops_the_deployment_before_a_replica_starts(seen: dict[str, Any]) -> None:
    assert "cluster pepper: 127.0.0.2 (" in seen["refused"]["message"]
    assert seen["refused"]["seconds"] < 60
    assert seen["refused"]["replicas"] == []


def test_more_replicas_than_the_nodes_hold_are_named_before_a_deployment(seen: dict[str, Any]) -> None:
    scaled, greedy = seen["too_much"]
    assert scaled.startswith("warn: generator: 1 of 3 replicas find no node")
    assert greedy == "fail: generator: no living node has space for a replica"


def test_a_new_cluster_runs_once_a_generator_of_its_own_has_drawn(seen: dict[str, Any]) -> None:
    """Without work, and with `min_replicas: 0`: until then KubeRay leaves the traffic with the old cluster."""
    assert seen["shown"]


def test_a_silent_head_keeps_no_caller_of_an_ingress_waiting_whose_first_job_comes_then(seen: dict[str, Any]) -> None:
    silence = seen["silence"]
    assert silence["silent"] == 2, "Ray's GCS and Serve's controller"
    assert silence["statuses"] == [200, 202]
    assert silence["longest_s"] < 5, "a blocked event loop answers nobody"
    assert silence["generator"] in ("scaled to zero", "ok"), "nobody knows what Serve promises"
    assert silence["ended"] == ["completed"]


def test_a_changed_bound_restarts_no_replica_and_starts_none(seen: dict[str, Any]) -> None:
    assert seen["kept"]


def test_generators_on_fractions_go_from_zero_to_two_and_back(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2, "by the bound that was changed while it served: a replica on each node"
    assert seen["shrunk_s"] < 220, "after a while of demand below one replica, on a busy machine that drew long"
    assert (seen["upscalers_before"], seen["enlarged"]) == (0, "completed"), "scaled from zero to one by the backlog"


def test_readiness_knows_a_bound_that_was_changed_while_it_served(seen: dict[str, Any]) -> None:
    assert seen["unneeded"]["generator"] == "scaled to zero"
    assert seen["missing"]["generator"] == "none has started"


def test_a_killed_node_costs_its_jobs_no_more_than_time(seen: dict[str, Any]) -> None:
    assert seen["statuses"] == ["completed"]
    assert seen["pictures"] == 1, "the same request gives the same bytes on every node"
    assert seen["lost"] == 1
    assert seen["attempts"] >= 2, "some jobs had to start over"
