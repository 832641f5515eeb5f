"""Each rule finds the breach that it is for."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.manifests.chart import Document, find, rendered
from tests.manifests.rules import RULES, broken_rules


def cluster(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "RayService")["spec"]["rayClusterConfig"]


def head(documents: list[Document]) -> dict[str, Any]:
    return cluster(documents)["headGroupSpec"]["template"]["spec"]["containers"][0]


def pod(documents: list[Document], group: int = 0) -> dict[str, Any]:
    """The pod of a worker group: 0 generation, 1 ingress, 2 upscaling."""
    return cluster(documents)["workerGroupSpecs"][group]["template"]["spec"]


def container(documents: list[Document], group: int = 0) -> dict[str, Any]:
    return pod(documents, group)["containers"][0]


def redis(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "StatefulSet", "atelier-redis-jobs")["spec"]["template"]["spec"]


def replace(documents: list[Document], old: str, new: str) -> None:
    data = find(documents, "ConfigMap", "atelier-redis-jobs")["data"]
    assert old in data["redis.conf"]
    data["redis.conf"] = data["redis.conf"].replace(old, new)


BREACHES: dict[str, list[Callable[[list[Document]], Any]]] = {
    "no_pod_may_more_than_it_needs": [
        lambda d: pod(d)["securityContext"].update(runAsNonRoot=False),
        lambda d: redis(d)["securityContext"].update(runAsUser=0),
        lambda d: pod(d)["securityContext"].pop("seccompProfile"),
        lambda d: pod(d).pop("enableServiceLinks"),
        lambda d: pod(d).update(hostNetwork=True),
        lambda d: pod(d)["volumes"].append({"name": "v", "hostPath": {"path": "/"}}),
        lambda d: container(d)["ports"][0].update(hostPort=8080),
        lambda d: container(d)["securityContext"].update(privileged=True),
        lambda d: container(d)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]),
        lambda d: container(d)["securityContext"].update(readOnlyRootFilesystem=False),
        lambda d: cluster(d)["autoscalerOptions"].pop("securityContext"),
    ],
    "every_container_has_requests_and_limits": [
        lambda d: container(d)["resources"]["limits"].pop("memory"),
        lambda d: pod(d)["initContainers"][0].pop("resources"),
    ],
    "secrets_come_by_reference": [
        lambda d: container(d)["env"].append({"name": "HF_TOKEN", "value": "hf_x"}),
        lambda d: container(d)["env"].append({"name": "ATELIER_REDIS_URL", "value": "redis://:word@redis:6379/0"}),
        lambda d: container(d).update(envFrom=[{"secretRef": {"name": "atelier-secrets"}}]),
        lambda d: find(d, "ConfigMap", "atelier-catalog")["data"].update(ATELIER_PEPPER="x"),
    ],
    "service_account_tokens_are_for_those_who_use_them": [
        lambda d: pod(d).pop("automountServiceAccountToken"),
        lambda d: redis(d).pop("serviceAccountName"),
    ],
    "every_pod_has_a_network_policy_for_both_ways": [
        lambda d: d.remove(find(d, "NetworkPolicy", "atelier-redis-jobs")),
        lambda d: find(d, "NetworkPolicy", "atelier-head")["spec"].update(policyTypes=["Ingress"]),
    ],
    "every_selector_finds_a_pod": [
        lambda d: find(d, "Service", "atelier-redis-jobs")["spec"]["selector"].update(
            {"app.kubernetes.io/component": "redis"}
        ),
        lambda d: find(d, "PodDisruptionBudget", "atelier-ingress")["spec"]["selector"]["matchLabels"].update(app="x"),
    ],
    "every_reference_is_kept": [
        lambda d: d.remove(find(d, "ConfigMap", "atelier-catalog")),
        lambda d: d.remove(find(d, "PersistentVolumeClaim", "atelier-models")),
        lambda d: d.remove(find(d, "ServiceAccount", "atelier-head")),
        lambda d: pod(d)["volumes"].pop(),
    ],
    "redis_keeps_what_it_confirms": [
        lambda d: replace(d, "appendfsync always", "appendfsync everysec"),
        lambda d: replace(d, "noeviction", "allkeys-lru"),
        lambda d: replace(d, "maxmemory ", "maxmemory 9"),
        lambda d: find(d, "StatefulSet", "atelier-redis-jobs")["spec"].update(volumeClaimTemplates=[]),
        lambda d: redis(d)["containers"][0].update(args=["exec valkey-server"]),
    ],
    "a_role_is_for_named_objects": [
        lambda d: find(d, "Role")["rules"][0].pop("resourceNames"),
        lambda d: find(d, "Role")["rules"][0].update(verbs=["*"]),
    ],
    "what_cannot_be_made_again_outlives_the_release": [
        lambda d: find(d, "Secret")["metadata"].pop("annotations"),
    ],
    "kuberay_takes_the_service": [
        lambda d: cluster(d)["headGroupSpec"].update(resources={"CPU": "0"}),
        lambda d: find(d, "RayService")["metadata"].update(name="a" * 42),
        lambda d: pod(d).update(restartPolicy="Always"),
        lambda d: head(d)["env"].append({"name": "REDIS_PASSWORD", "valueFrom": {}}),
    ],
}


@pytest.mark.parametrize(("name", "spoil"), [(name, spoil) for name, spoils in BREACHES.items() for spoil in spoils])
def test_a_planted_breach_is_found(name: str, spoil: Callable[[list[Document]], Any]) -> None:
    documents = rendered("production")
    spoil(documents)
    assert name in {breach.split(":")[0] for breach in broken_rules(documents)}


def test_every_rule_has_a_planted_breach() -> None:
    assert {rule.__name__ for rule in RULES} == set(BREACHES)
