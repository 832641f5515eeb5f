"""Who reaches what, over all network policies of an installation, as docs/operate/kubernetes.md tells it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.manifests.chart import Document, merge, profile_values, render
from tests.support import ROOT

RAY, MONITORING, DNS = "Ray pods", "monitoring", "kube-system kube-dns"
OPERATOR, EDGE = "kuberay-system kuberay-operator", "envoy-gateway-system"
OUTSIDE, API, WORK = "0.0.0.0/0 443", "0.0.0.0/0 443 6443", "redis-jobs 6379"
ASKED_BY_RAY = {RAY, f"{MONITORING} 8080"}
WORKER = {RAY, WORK, OUTSIDE}
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "head": (ASKED_BY_RAY | {f"{OPERATOR} 8000 8265"}, {RAY, WORK, "redis-gcs 6379", API}),
    "ingress": ({RAY, f"{EDGE} 8000", f"{MONITORING} 8000 8080"}, WORKER),
    "generation": (ASKED_BY_RAY, WORKER),
    "upscaling": (ASKED_BY_RAY, WORKER),
    "z-image": (ASKED_BY_RAY, WORKER),
    "redis-jobs": ({f"{RAY} 6379", "account-job 6379", "redis-backup 6379"}, set()),
    "redis-gcs": ({"head 6379"}, set()),
    "redis-backup": (set(), {WORK, OUTSIDE}),
    "models-job": (set(), {OUTSIDE}),
    "account-job": (set(), {WORK, API}),
}
"""By component: who reaches it, and what it reaches besides DNS."""
COPIES: dict[str, Any] = {"redis": {"jobs": {"backup": {"enabled": True, "url": "s3://copies/redis"}}}}


def policies(**change: Any) -> dict[str, dict[str, Any]]:
    documents = render(merge(merge(profile_values("production"), COPIES), change))
    found: list[Document] = [each for each in documents if each["kind"] == "NetworkPolicy"]
    return {each["metadata"]["name"].removeprefix("atelier-"): each["spec"] for each in found}


def reached(rules: list[dict[str, Any]], side: str) -> set[str]:
    """Each peer of the rules with its ports, but for DNS."""
    return {
        " ".join([peer, *sorted(str(port["port"]) for port in rule.get("ports", []))])
        for rule in rules
        for peer in map(name, rule[side])
        if peer != DNS
    }


def name(peer: dict[str, Any]) -> str:
    """Who that is: the labels of a namespace and of its pods, a component of this release, or an address."""
    return " ".join(words(peer))


def words(peer: dict[str, Any]) -> Iterator[str]:
    if "ipBlock" in peer:
        yield peer["ipBlock"]["cidr"]
    if "namespaceSelector" in peer:
        yield from peer["namespaceSelector"]["matchLabels"].values()
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if "app.kubernetes.io/instance" not in labels:
        yield from labels.values()
    else:
        assert labels["app.kubernetes.io/instance"] == "atelier"
        yield RAY if labels.get("ray.io/is-ray-node") == "yes" else labels["app.kubernetes.io/component"]


def test_every_pod_is_reached_by_those_who_need_it_and_by_no_other() -> None:
    found = {
        component: (reached(spec["ingress"], "from"), reached(spec["egress"], "to"))
        for component, spec in policies().items()
    }
    assert found == EXPECTED
    assert policies(serviceMonitor={"enabled": False}) == policies(), "whoever finds pods by itself scrapes too"


def test_the_guide_tells_who_reaches_what() -> None:
    text = (ROOT / "docs" / "operate" / "kubernetes.md").read_text().partition("## Who reaches what")[2]
    rows = re.findall(r"^\| ([a-z][\w, -]+) \|", text, flags=re.MULTILINE)
    told = {each.replace(" job", "-job") for row in rows[1:] for each in row.split(", ")}
    assert EXPECTED.keys() - {"z-image"} | {"further groups"} <= told


@pytest.mark.parametrize(
    ("change", "component", "gone", "new"),
    [
        ({"redis": {"jobs": {"backup": {"url": ""}}}}, "redis-backup", {OUTSIDE}, set[str]()),
        ({"redis": {"gcs": {"enabled": False}}}, "head", {"redis-gcs 6379"}, set[str]()),
        (
            {"redis": {"gcs": {"enabled": False, "address": "redis.example.com:6379"}}},
            "head",
            {"redis-gcs 6379"},
            {OUTSIDE},
        ),
        ({"ray": {"autoscaling": {"enabled": False}}}, "head", {API}, set[str]()),
    ],
)
def test_a_pod_reaches_what_its_values_ask_for(
    change: dict[str, Any], component: str, gone: set[str], new: set[str]
) -> None:
    assert reached(policies(**change)[component]["egress"], "to") == EXPECTED[component][1] - gone | new
