"""What operators add by values is in the rendered objects, valid, and refused when it is misspelt."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import helm_python
import pytest
import yaml

from tests.manifests.chart import CHART, PROFILES, Document, find, merge, profile_values, render
from tests.manifests.pods import pods, templates
from tests.manifests.schemas import mistakes
from tests.manifests.values_schema import SCHEMA, written_schema

POD_VALUES: dict[str, Any] = {
    "podLabels": {"team": "images"},
    "podAnnotations": {"sidecar.example.com/inject": "true"},
    "schedulerName": "volcano",
    "priorityClassName": "images",
    "runtimeClassName": "nvidia",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
}
"""These may be set for every group of pods that stays."""
RAY_VALUES: dict[str, Any] = {
    "extraContainers": [
        {"name": "logs", "image": "collector:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    ],
    "extraVolumes": [{"name": "fonts", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/fonts"}],
}
"""These may be set for pods of Ray."""
PLACES = {
    "head": "head",
    "workerGroups.generation": "generation",
    "redis.jobs": "redis-jobs",
    "redis.gcs": "redis-gcs",
}
"""By their place among the values: the components of pods."""


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def with_value(path: str, value: Any) -> list[Document]:
    """The production installation with this value; every object is valid."""
    documents = render(merge(profile_values("production"), nested(path, value)))
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    return documents


def template(documents: list[Document], component: str) -> dict[str, Any]:
    """The pod template of a component, as the chart writes it."""
    found = [pod for document in documents for _, pod in _written(document)]
    (pod,) = [each for each in found if each["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    return pod


def _written(document: Document) -> Iterable[tuple[str, dict[str, Any]]]:
    if document["kind"] != "RayService":
        return templates(document)
    cluster = document["spec"]["rayClusterConfig"]
    return [("", group["template"]) for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("place", PLACES)
def test_every_group_of_pods_takes_what_operators_add(place: str) -> None:
    values = POD_VALUES if place.startswith("redis") else POD_VALUES | RAY_VALUES
    pod = template(with_value(place, values), PLACES[place])
    metadata, spec = pod["metadata"], pod["spec"]
    assert metadata["labels"]["team"] == "images"
    assert metadata["annotations"].items() >= POD_VALUES["podAnnotations"].items()
    for name in ("schedulerName", "priorityClassName", "runtimeClassName", "topologySpreadConstraints"):
        assert spec[name] == POD_VALUES[name]
    if not place.startswith("redis"):
        container, *others = spec["containers"]
        assert others == RAY_VALUES["extraContainers"], "the first is Ray's for KubeRay"
        assert RAY_VALUES["extraVolumes"][0] in spec["volumes"]
        assert RAY_VALUES["extraVolumeMounts"][0] in container["volumeMounts"]
    (spread,) = POD_VALUES["topologySpreadConstraints"]
    refused(f"{place}.topologySpreadConstraints", [{**spread, "maxSkews": 1}], "'maxSkews' not allowed")
    for name, value in values.items():
        refused(f"{place}.{name}s", value, "not allowed")
        refused(f"{place}.{name}", 1, f"/{name}")


def refused(path: str, value: Any, message: str) -> None:
    assert message in refusal(merge(profile_values("production"), nested(path, value)))


def test_the_schema_has_the_names_of_the_code() -> None:
    assert SCHEMA.read_text() == written_schema(), "run `make schema`"


NAMES_OF_OPERATORS = re.compile(
    r"workerGroups/[^/]+|.*(nodeSelector|[lL]abels|annotations)/.*|(ray/environment|storage/options)/.*"
)
"""Places where any name is right."""


@pytest.mark.parametrize("file", ["", *(f"-{profile}" for profile in PROFILES)])
def test_a_misspelt_value_of_a_file_is_refused_wherever_it_stands(file: str) -> None:
    content = yaml.safe_load((CHART / f"values{file}.yaml").read_text())
    own = profile_values(file.removeprefix("-") or "production")
    spoiled = {"/".join(place): (place[-1], changed) for place, changed in misspelt(content)}
    assert len(spoiled) > 8
    accepted = [
        place
        for place, (name, changed) in spoiled.items()
        if not NAMES_OF_OPERATORS.fullmatch(place)
        and not re.search(
            rf"'{name}s'( not allowed|\n.*must be one of)",
            refusal(merge(own, changed) if file else merge(changed, own)),
        )
    ]
    assert accepted == []


def refusal(values: dict[str, Any]) -> str:
    """What the chart says of values that it refuses; nothing when it takes them."""
    try:
        render(values)
    except helm_python.HelmError as error:
        return str(error)
    return ""


def misspelt(node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values with one name more, which is nearly right, and the place of that name; for each of their names."""
    if isinstance(node, dict):
        named = cast(dict[str, Any], node)
        for name, value in named.items():
            yield (name,), {**named, f"{name}s": value}
            for place, changed in misspelt(value):
                yield (name, *place), {**named, name: changed}
    if isinstance(node, list):
        rows = cast(list[Any], node)
        for number, row in enumerate(rows):
            for place, changed in misspelt(row):
                yield (str(number), *place), [*rows[:number], changed, *rows[number + 1 :]]


def test_labels_of_operators_do_not_change_what_policies_select_by() -> None:
    own = {"app.kubernetes.io/component": "head"}
    documents = with_value("workerGroups.generation.podLabels", own)
    assert "generation" in {pod.component for pod in pods(documents)}


def test_pods_of_a_group_are_spread_over_nodes_unless_a_value_places_them() -> None:
    def affinity(documents: list[Document]) -> dict[str, Any]:
        return template(documents, "ingress")["spec"]["affinity"]

    (spread,) = affinity(render(profile_values("production")))["podAntiAffinity"].values()
    assert spread[0]["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    own: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    }
    assert affinity(render(merge(profile_values("production"), nested("workerGroups.ingress.affinity", own)))) == own
    refused("workerGroups.ingress.affinity", {"nodeAffinitys": {}}, "'nodeAffinitys' not allowed")


def cluster(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "RayService")["spec"]["rayClusterConfig"]


def generation(documents: list[Document]) -> dict[str, Any]:
    (group,) = [each for each in cluster(documents)["workerGroupSpecs"] if each["groupName"] == "generation"]
    return group


def limits(documents: list[Document]) -> dict[str, Any]:
    return generation(documents)["template"]["spec"]["containers"][0]["resources"]["limits"]


def edges(documents: list[Document]) -> list[dict[str, Any]]:
    rules = find(documents, "NetworkPolicy", "atelier-ingress")["spec"]["ingress"]
    return [
        peer for rule in rules if {"port": 8000, "protocol": "TCP"} in rule.get("ports", []) for peer in rule["from"]
    ]


def backup(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "CronJob")["spec"]


def budgets(documents: list[Document]) -> list[str]:
    return [each["metadata"]["name"] for each in documents if each["kind"] == "PodDisruptionBudget"]


OWN_GCS = {"enabled": False, "address": "rediss://redis.example.com:6379", "username": "ray"}
SIZES = {kind: {"cpu": 8, "memory": "32Gi", "rdma/ib": 1} for kind in ("requests", "limits")}
Seen = Callable[[list[Document]], object]
VALUES: list[tuple[str, Any, Seen, tuple[str, Any, str]]] = [
    (
        "ray.upgradeStrategy",
        "None",
        lambda found: find(found, "RayService")["spec"]["upgradeStrategy"] == {"type": "None"},
        ("ray.upgradeStrategy", "Never", "/ray/upgradeStrategy"),
    ),
    (
        "ray.clusterDeletionDelaySeconds",
        240,
        lambda found: find(found, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] == 240,
        ("ray.clusterDeletionDelaySecond", 240, "not allowed"),
    ),
    (
        "limits.requestsPerSecondPerAddress",
        7,
        lambda found: (
            {
                rule["limit"]["requests"]
                for rule in find(found, "BackendTrafficPolicy")["spec"]["rateLimit"]["local"]["rules"]
            }
            == {7}
        ),
        ("limits.requestsPerSecondsPerAddress", 7, "not allowed"),
    ),
    (
        "gateway.parentRefs",
        [{"name": "shared", "namespace": "gateways"}],
        lambda found: (
            find(found, "HTTPRoute")["spec"]["parentRefs"] == [{"name": "shared", "namespace": "gateways"}]
            and "Gateway" not in {each["kind"] for each in found}
        ),
        ("gateway.parentRef", [], "not allowed"),
    ),
    (
        "workerGroups.generation.idleTimeoutSeconds",
        30,
        lambda found: generation(found)["idleTimeoutSeconds"] == 30,
        ("workerGroups.generation.idleTimeoutSecond", 30, "not allowed"),
    ),
    (
        "workerGroups.generation.gpuResource",
        "nvidia.com/mig-3g.40gb",
        lambda found: limits(found)["nvidia.com/mig-3g.40gb"] == "1" and "nvidia.com/gpu" not in limits(found),
        ("workerGroups.generation.gpuResource", "mig-3g.40gb", "/gpuResource"),
    ),
    (
        "workerGroups.generation.resources",
        SIZES,
        lambda found: limits(found)["rdma/ib"] == 1,
        ("workerGroups.generation.resources.limits", {"cpuu": 1}, "'cpuu' not allowed"),
    ),
    (
        "gateway.controller",
        "envoy-gateway",
        lambda found: (
            find(found, "BackendTrafficPolicy")["spec"]["targetRefs"][0]["name"]
            == find(found, "HTTPRoute")["metadata"]["name"]
        ),
        ("gateway.controller", "envoy", "/gateway/controller"),
    ),
    (
        "networkPolicy.edge",
        {"namespaceLabels": None, "cidrs": ["10.1.0.0/16"]},
        lambda found: {"ipBlock": {"cidr": "10.1.0.0/16"}} in edges(found) and len(edges(found)) == 2,
        ("networkPolicy.edge", {"cidr": ["10.1.0.0/16"]}, "'cidr' not allowed"),
    ),
    (
        "redis.jobs.podDisruptionBudget",
        {"minAvailable": 1},
        lambda found: budgets(found) == ["atelier-ingress", "atelier-redis-jobs"],
        ("redis.jobs.podDisruptionBudget", {"minAvailable": "50%"}, "podDisruptionBudget"),
    ),
    (
        "redis.jobs.backup",
        {"enabled": True, "schedule": "@hourly"},
        lambda found: (backup(found)["schedule"], backup(found)["concurrencyPolicy"]) == ("@hourly", "Forbid"),
        ("redis.jobs.backup", {"schedule": "17 3 *"}, "/backup/schedule"),
    ),
    (
        "serviceMonitor.runbooks",
        "https://docs.example.com/runbooks",
        lambda found: all(
            rule["annotations"]["runbook_url"] == f"https://docs.example.com/runbooks#{rule['alert'].lower()}"
            for rule in find(found, "PrometheusRule")["spec"]["groups"][0]["rules"]
        ),
        ("serviceMonitor.runbook", "https://docs.example.com/runbooks", "not allowed"),
    ),
    (
        "redis.gcs",
        OWN_GCS,
        lambda found: (
            cluster(found)["gcsFaultToleranceOptions"].items()
            >= {"redisAddress": OWN_GCS["address"], "redisUsername": {"value": "ray"}}.items()
        ),
        ("redis.gcs", {"adress": "redis:6379"}, "'adress' not allowed"),
    ),
]


@pytest.mark.parametrize(("path", "value", "seen", "typo"), VALUES, ids=[path for path, *_ in VALUES])
def test_a_value_is_rendered_and_its_typo_refused(
    path: str, value: Any, seen: Seen, typo: tuple[str, Any, str]
) -> None:
    assert seen(with_value(path, value))
    refused(*typo)


def test_a_server_of_ones_own_is_not_copied_by_the_chart() -> None:
    own = {"enabled": False, "urlSecret": {"name": "redis", "key": "url"}, "backup": {"enabled": True}}
    refused("redis.jobs", own, "a server of your own is copied by its own means")


def test_the_head_reaches_a_redis_of_ones_own_for_ray() -> None:
    reached = find(with_value("redis.gcs", OWN_GCS), "NetworkPolicy", "atelier-head")["spec"]["egress"]
    assert any(
        "ipBlock" in peer
        for rule in reached
        for peer in rule["to"]
        if {"port": 443, "protocol": "TCP"} in rule.get("ports", ())
    )
