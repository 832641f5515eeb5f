"""What a changed value does to an installation that runs: a new Job, a new cluster, or neither.

A new cluster is made when KubeRay's hash of its specification changes. What KubeRay 1.7 computes is emulated here
(`GenerateHashWithoutReplicasAndWorkersToDelete` and `isClusterSpecHashEqual` of its operator): no cluster is at hand.
"""

import base64
import copy
import hashlib
import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.chart import (
    CHART,
    Document,
    chart_beside_secret,
    find,
    merge,
    profile_values,
    render,
    rendered,
)
from tests.manifests.pods import pods

NOT_HASHED = ("replicas", "minReplicas", "maxReplicas")
NOT_HASHED_OF_PODS = ("tolerations", "schedulingGates")


def cluster(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "RayService")["spec"]["rayClusterConfig"]


def kuberays_hash(specification: dict[str, Any], *, groups: int | None = None) -> str:
    """The hash of the cluster with its first worker groups; with all of them when no number is given."""
    hashed = copy.deepcopy(specification)
    hashed["workerGroupSpecs"] = hashed.get("workerGroupSpecs", [])[:groups]
    for group in hashed["workerGroupSpecs"]:
        for name in NOT_HASHED:
            group.pop(name, None)
        group.get("scaleStrategy", {}).pop("workersToDelete", None)
    for group in [hashed["headGroupSpec"], *hashed["workerGroupSpecs"]]:
        for name in NOT_HASHED_OF_PODS:
            group["template"]["spec"].pop(name, None)
    for name in ("upgradeStrategy", "suspend"):
        hashed.pop(name, None)
    digest = hashlib.sha1(json.dumps(hashed, sort_keys=True).encode(), usedforsecurity=False).digest()
    return base64.b32hexencode(digest).decode()


def is_new_cluster(running: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether KubeRay makes another cluster: groups that only follow those that are there are added to it."""
    there = len(running.get("workerGroupSpecs", []))
    return kuberays_hash(running) not in (kuberays_hash(wanted), kuberays_hash(wanted, groups=there))


GPU_TAINT = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
PLAN = {"interface": "a", "name": "studio", "limit": 5, "window_s": 1}
SDXL = {"id": "sdxl", "folder": "/models/other"}
MANY = ("production",)
"""It is many-gpus with more values."""
WITH_GROUPS = ("one-gpu", *MANY)
EVERY = ("cpu-demo", *WITH_GROUPS)
CHANGES: list[tuple[dict[str, Any], bool, Collection[str]]] = [
    ({"image": {"digest": "sha256:" + 64 * "7"}}, True, EVERY),
    ({"environment": {"ATELIER_LEASE": "PT20S"}}, True, EVERY),
    ({"secrets": {"revision": "2"}}, True, EVERY),
    ({"plans": [{**PLAN, "limit": 6}]}, True, EVERY),
    ({"catalog": {"base_models": [SDXL]}}, True, ("one-gpu", "cpu-demo")),
    ({"catalog": {"base_models": [SDXL, {"id": "turbo", "folder": "/models/turbo", "group": "z-image"}]}}, True, MANY),
    ({"workerGroups": {"generation": {"maxReplicas": 12}}}, True, WITH_GROUPS),
    ({"workerGroups": {"ingress": {"minReplicas": 0}}}, True, WITH_GROUPS),
    ({"workerGroups": {"generation": {"tolerations": [GPU_TAINT]}}}, True, WITH_GROUPS),
    ({"workerGroups": {"z-image": {"maxReplicas": 6}}}, True, MANY),
    ({"head": {"tolerations": [GPU_TAINT]}}, True, EVERY),
    ({"catalog": {"adapters": []}}, False, MANY),
    ({"serve": {"scaling": {"generator": {"max_replicas": 4}}}}, False, MANY),
    ({"serve": {"groups": {"z-image": {"scaling": {"generator": {"max_replicas": 2}}}}}}, False, MANY),
    ({"serve": {"groups": {"z-image": {"args": {"drain_s": 44}}}}}, False, MANY),
    ({"serve": {"args": {"generator": {"drain_s": 44}}}}, False, EVERY),
    ({"limits": {"requestSeconds": 70}}, False, ("production",)),
    ({"ray": {"upgradeStrategy": "None"}}, False, EVERY),
]
"""What changes, whether that makes a new cluster, and the installations that it may be changed in."""


def values_of_plan(profile: str) -> dict[str, Any]:
    return merge(profile_values(profile), {"plans": [PLAN]})


@cache
def of_plan(profile: str) -> list[Document]:
    """The objects of an installation with a plan; nobody changes them."""
    return render(values_of_plan(profile))


@pytest.mark.parametrize(
    ("profile", "change", "is_new"),
    [(profile, change, is_new) for change, is_new, profiles in CHANGES for profile in profiles],
    ids=lambda each: json.dumps(each)[:60],
)
def test_a_new_cluster_is_made_by_what_its_processes_cannot_read_again(
    profile: str, change: dict[str, Any], is_new: bool
) -> None:
    before, after = of_plan(profile), render(merge(values_of_plan(profile), change))
    assert [each for each in before if each["kind"] != "Secret"] != [each for each in after if each["kind"] != "Secret"]
    assert is_new_cluster(cluster(before), cluster(after)) is is_new


@pytest.mark.parametrize("change", [{"environment": {"ATELIER_LEASE": "PT20S"}}, {"plans": [{**PLAN, "limit": 6}]}])
def test_a_pod_of_an_older_cluster_that_is_made_during_an_upgrade_reads_what_it_had(change: dict[str, Any]) -> None:
    before, after = of_plan("production"), render(merge(values_of_plan("production"), change))
    mounted = set(re.findall(r"'configMap(?:Ref)?': \{'name': '([\w-]+)'", str(cluster(before))))
    assert mounted == {"atelier-catalog", "atelier-fetch-models"}
    for name in mounted:
        assert find(before, "ConfigMap", name)["data"] == find(after, "ConfigMap", name)["data"]
    of_plans = [each for each in pods(before) if "plans.yaml" in str(each.spec["volumes"])]
    assert len(of_plans) == 6
    for pod in of_plans:
        assert yaml.safe_load(pod.annotations["atelier/plans"]) == [PLAN], "what the downward API writes"


def test_what_a_values_file_below_says_of_the_catalog_can_be_taken_back() -> None:
    """Pods of the cluster that had one mount it still."""
    documents = render(merge(values_of_plan("one-gpu"), {"catalog": None}))
    assert "ATELIER_CATALOG" not in str(documents)
    kept = find(of_plan("production"), "ConfigMap", "atelier-catalog")["metadata"]
    assert kept["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_worker_group_behind_the_others_joins_the_running_cluster() -> None:
    """KubeRay compares the groups that are there; they are in the order of their names."""
    generation = yaml.safe_load((CHART / "values.yaml").read_text())["workerGroups"]["generation"]
    for name, is_new in (("generation-2", True), ("z-image-2", False)):
        added = {"workerGroups": {name: generation}}
        wanted = cluster(render(merge(profile_values("production"), added)))
        assert is_new_cluster(cluster(rendered("production")), wanted) is is_new


def test_redis_starts_again_with_other_users_and_with_their_passwords(tmp_path: Path) -> None:
    """It reads them when it starts. A Secret of an earlier version lacks the passwords."""

    def pod(name: str, *, users: str = "", **secret: str) -> dict[str, Any]:
        folder, acl = (
            chart_beside_secret(tmp_path / name, **secret),
            tmp_path / name / "atelier" / "files" / "users.acl",
        )
        acl.write_text(acl.read_text() + users)
        documents = render(profile_values("production"), folder=folder)
        return find(documents, "StatefulSet", "atelier-redis-jobs")["spec"]["template"]

    new = pod("new", redis_scaler_password="eA==", redis_operator_password="eA==")
    users = "user guest on\n"
    assert pod("other", redis_scaler_password="eA==", redis_operator_password="eA==", users=users) != new
    assert pod("old", redis_password="eA==") != new


@pytest.mark.parametrize(("profile", "count"), [("one-gpu", 0), ("many-gpus", 1), ("cpu-demo", 1), ("production", 2)])
def test_a_job_has_another_name_when_its_pods_change(profile: str, count: int) -> None:
    """Kubernetes refuses a changed `spec.template`."""
    before = jobs(rendered(profile))
    assert len(before) == count
    for change in (
        {"image": {"digest": "sha256:" + 64 * "7"}},
        {"image": {"pullSecrets": [{"name": "registry"}]}},
        {"podSecurityContext": {"runAsUser": 2000}},
    ):
        assert before.keys().isdisjoint(jobs(render(merge(profile_values(profile), change)))), change
    assert jobs(render(merge(profile_values(profile), {"limits": {"requestSeconds": 70}}))) == before


def test_another_list_of_models_is_another_job() -> None:
    """The list is in a ConfigMap."""
    more = {"models": {"downloads": [{"name": "sdxl", "url": "s3://weights/sdxl"}]}}
    before, after = jobs(rendered("production")), jobs(render(merge(profile_values("production"), more)))
    assert len(before.keys() & after.keys()) == 1


def jobs(documents: list[Document]) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"]["template"] for each in documents if each["kind"] == "Job"}
