"""Each rule finds the breach that it is for."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.manifests.chart import Document, find, rendered
from tests.manifests.rules import RULES, broken_rules


def pod(documents: list[Document], group: int = 0) -> dict[str, Any]:
    """The pod of a worker group: 0 generation, 1 ingress, 2 upscaling."""
    return find(documents, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][group]["template"]["spec"]


def container(documents: list[Document], group: int = 0) -> dict[str, Any]:
    return pod(documents, group)["containers"][0]


def redis(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "StatefulSet", "atelier-redis-jobs")["spec"]["template"]["spec"]


def policy(documents: list[Document], name: str) -> dict[str, Any]:
    return find(documents, "NetworkPolicy", f"atelier-{name}")["spec"]


def configuration(documents: list[Document]) -> dict[str, str]:
    return find(documents, "ConfigMap", "atelier-redis-jobs")["data"]


def replace(documents: list[Document], old: str, new: str) -> None:
    data = configuration(documents)
    assert old in data["redis.conf"]
    data["redis.conf"] = data["redis.conf"].replace(old, new)


BREACHES: list[tuple[str, Callable[[list[Document]], Any]]] = [
    ("no_pod_runs_as_root", lambda d: pod(d)["securityContext"].update(runAsNonRoot=False)),
    ("no_pod_runs_as_root", lambda d: redis(d)["securityContext"].update(runAsUser=0)),
    ("no_pod_runs_as_root", lambda d: pod(d)["securityContext"].pop("seccompProfile")),
    ("no_pod_runs_as_root", lambda d: container(d)["securityContext"].update(runAsUser=0)),
    ("no_container_has_a_privilege", lambda d: container(d)["securityContext"].update(privileged=True)),
    ("no_container_has_a_privilege", lambda d: container(d)["securityContext"].pop("capabilities")),
    (
        "no_container_has_a_privilege",
        lambda d: container(d)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]),
    ),
    ("no_container_has_a_privilege", lambda d: container(d)["securityContext"].update(readOnlyRootFilesystem=False)),
    (
        "no_container_has_a_privilege",
        lambda d: find(d, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"].pop("securityContext"),
    ),
    ("no_pod_reaches_into_its_node", lambda d: pod(d).update(hostNetwork=True)),
    ("no_pod_reaches_into_its_node", lambda d: pod(d)["volumes"].append({"name": "v", "hostPath": {"path": "/"}})),
    ("no_pod_reaches_into_its_node", lambda d: container(d)["ports"][0].update(hostPort=8080)),
    ("every_container_has_requests_and_limits", lambda d: container(d)["resources"]["limits"].pop("memory")),
    ("every_container_has_requests_and_limits", lambda d: pod(d)["initContainers"][0].pop("resources")),
    ("every_image_names_its_version", lambda d: container(d).update(image="registry.example.com:5000/atelier")),
    ("every_image_names_its_version", lambda d: container(d).update(image="atelier:latest")),
    ("secrets_come_by_reference", lambda d: container(d)["env"].append({"name": "HF_TOKEN", "value": "hf_x"})),
    (
        "secrets_come_by_reference",
        lambda d: container(d)["env"].append({"name": "ATELIER_REDIS_URL", "value": "redis://:word@redis:6379/0"}),
    ),
    ("secrets_come_by_reference", lambda d: container(d)["envFrom"].append({"secretRef": {"name": "atelier-secrets"}})),
    (
        "secrets_come_by_reference",
        lambda d: find(d, "ConfigMap", "atelier-environment")["data"].update(ATELIER_PEPPER="x"),
    ),
    (
        "each_pod_gets_the_secrets_it_needs",
        lambda d: container(d)["env"].append({"name": "ATELIER_SIGNING_KEYS", "valueFrom": {}}),
    ),
    ("service_account_tokens_are_for_those_who_use_them", lambda d: pod(d).pop("automountServiceAccountToken")),
    ("service_account_tokens_are_for_those_who_use_them", lambda d: redis(d).pop("serviceAccountName")),
    (
        "every_pod_has_a_network_policy_for_both_ways",
        lambda d: d.remove(find(d, "NetworkPolicy", "atelier-redis-jobs")),
    ),
    ("every_pod_has_a_network_policy_for_both_ways", lambda d: policy(d, "head").update(policyTypes=["Ingress"])),
    ("no_network_policy_opens_to_everyone", lambda d: policy(d, "ingress")["ingress"][1].pop("from")),
    (
        "no_network_policy_opens_to_everyone",
        lambda d: policy(d, "ingress")["ingress"][1].update({"from": [{"namespaceSelector": {}}]}),
    ),
    ("no_network_policy_opens_to_everyone", lambda d: policy(d, "ingress")["ingress"][1].pop("ports")),
    ("no_network_policy_opens_to_everyone", lambda d: policy(d, "generation")["egress"][-1].pop("ports")),
    (
        "every_selector_finds_a_pod",
        lambda d: find(d, "Service", "atelier-redis-jobs")["spec"]["selector"].update(
            {"app.kubernetes.io/component": "redis"}
        ),
    ),
    (
        "every_selector_finds_a_pod",
        lambda d: find(d, "PodDisruptionBudget", "atelier-ingress")["spec"]["selector"]["matchLabels"].update(app="x"),
    ),
    ("every_reference_is_kept", lambda d: d.remove(find(d, "ConfigMap", "atelier-catalog"))),
    ("every_reference_is_kept", lambda d: d.remove(find(d, "PersistentVolumeClaim", "atelier-models"))),
    ("every_reference_is_kept", lambda d: d.remove(find(d, "ServiceAccount", "atelier-head"))),
    ("every_reference_is_kept", lambda d: pod(d)["volumes"].pop()),
    ("redis_keeps_what_it_confirms", lambda d: replace(d, "appendfsync always", "appendfsync everysec")),
    ("redis_keeps_what_it_confirms", lambda d: replace(d, "noeviction", "allkeys-lru")),
    ("redis_keeps_what_it_confirms", lambda d: replace(d, "maxmemory ", "maxmemory 9")),
    (
        "redis_keeps_what_it_confirms",
        lambda d: find(d, "StatefulSet", "atelier-redis-jobs")["spec"].update(volumeClaimTemplates=[]),
    ),
    (
        "kuberay_takes_the_service",
        lambda d: find(d, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"].update(resources={"CPU": "0"}),
    ),
    ("kuberay_takes_the_service", lambda d: find(d, "RayService")["metadata"].update(name="a" * 42)),
    ("kuberay_takes_the_service", lambda d: pod(d).update(restartPolicy="Always")),
    (
        "kuberay_takes_the_service",
        lambda d: find(d, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][
            0
        ]["env"].append({"name": "REDIS_PASSWORD", "valueFrom": {}}),
    ),
    ("redis_keeps_what_it_confirms", lambda d: redis(d)["containers"][0].update(args=["exec valkey-server"])),
]


@pytest.mark.parametrize(("name", "spoil"), BREACHES)
def test_a_planted_breach_is_found(name: str, spoil: Callable[[list[Document]], Any]) -> None:
    documents = rendered("production")
    spoil(documents)
    assert name in {breach.split(":")[0] for breach in broken_rules(documents)}


def test_every_rule_has_a_planted_breach() -> None:
    assert {rule.__name__ for rule in RULES} == {name for name, _ in BREACHES}
