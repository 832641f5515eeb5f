"""Rules that every pod and policy must keep, whatever the values.

A rule yields a sentence for each breach it finds. Linters of manifests see no pod of a RayService, nor a whole release.
What values can break alone is refused by the chart's schema, and `test_network.py` compares who reaches whom.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from tests.manifests.chart import Document, find
from tests.manifests.pods import Pod, pods

Rule = Callable[[list[Document]], Iterator[str]]
RULES: list[Rule] = []

SECRET_WORDS = re.compile(r"PASSWORD|SECRET|TOKEN|PEPPER|SIGNING|PRIVATE|CREDENTIAL", re.IGNORECASE)
URL_PASSWORD = re.compile(r"://[^/@]*:(?!\$\()[^/@]+@")
TOKEN_HOLDERS = {"head", "account-job"}
"""The autoscaler resizes the cluster, and the account job fills in a Secret; no other pod speaks to Kubernetes' API."""
POD = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "enableServiceLinks": False,  # links look like settings: `ATELIER_PORT` of a service called `atelier`
}
CONTAINER = {
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
}
FORBIDDEN = {("runAsUser", "0"), *((word, "True") for word in ("privileged", "hostNetwork", "hostPID", "hostIPC"))}
FORBIDDEN_WORDS = {"hostPath", "hostPort", "add"}
"""`add` would give a container a capability back."""
REFERENCES = {
    "configMap": ("ConfigMap", "name"),
    "configMapRef": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}
"""What pods refer to by these words is in the set; Secrets may be the operator's own."""


def broken_rules(documents: list[Document]) -> list[str]:
    return [f"{rule.__name__}: {breach}" for rule in RULES for breach in rule(documents)]


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


@rule
def no_pod_may_more_than_it_needs(documents: list[Document]) -> Iterator[str]:
    """It is not root, has no privilege and no part of its node."""
    for pod in pods(documents):
        if not _has(pod.spec, POD):
            yield pod.name
        yield from (f"{pod.name}/{each['name']}" for each in pod.containers if not _has(each, CONTAINER))
        for word, value in _words(pod.spec):
            if word in FORBIDDEN_WORDS or (word, str(value)) in FORBIDDEN:
                yield f"{pod.name}: {word}"


@rule
def every_container_has_requests_and_limits(documents: list[Document]) -> Iterator[str]:
    for where, container in _containers(documents):
        for kind in ("requests", "limits"):
            missing = {"cpu", "memory"} - set(container.get("resources", {}).get(kind, {}))
            yield from (f"{where}: no {name} in {kind}" for name in sorted(missing))


@rule
def secrets_come_by_reference(documents: list[Document]) -> Iterator[str]:
    for where, container in _containers(documents):
        for variable in container.get("env", []):
            if _is_secret(variable["name"], variable.get("value")):
                yield f"{where}: {variable['name']} in plain"
        if any("secretRef" in source for source in container.get("envFrom", [])):
            yield f"{where}: a whole Secret in the environment"
    for document in documents:
        for name, value in document.get("data", {}).items() if document["kind"] == "ConfigMap" else ():
            if _is_secret(name, value):
                yield f"ConfigMap/{document['metadata']['name']}: {name}"


@rule
def service_account_tokens_are_for_those_who_use_them(documents: list[Document]) -> Iterator[str]:
    for pod in pods(documents):
        if pod.spec.get("automountServiceAccountToken") is not False and pod.component not in TOKEN_HOLDERS:
            yield pod.name
        if not pod.spec.get("serviceAccountName"):
            yield f"{pod.name}: the namespace's default service account"


@rule
def every_pod_has_a_network_policy_for_both_ways(documents: list[Document]) -> Iterator[str]:
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    for pod in pods(documents):
        types = {way for each in policies if _selects(each["podSelector"], pod) for way in each["policyTypes"]}
        yield from (f"{pod.name}: {missing}" for missing in sorted({"Ingress", "Egress"} - types))


@rule
def every_selector_finds_a_pod(documents: list[Document]) -> Iterator[str]:
    everyone = pods(documents)
    for document in documents:
        for selector in _selectors(document):
            if not any(_selects(selector, pod) for pod in everyone):
                yield f"{document['kind']}/{document['metadata']['name']}: {selector}"


@rule
def every_reference_is_kept(documents: list[Document]) -> Iterator[str]:
    known = {(document["kind"], document["metadata"]["name"]) for document in documents}
    sets = [document["spec"] for document in documents if document["kind"] == "StatefulSet"]
    claims = {claim["metadata"]["name"] for stateful in sets for claim in stateful["volumeClaimTemplates"]}
    for pod in pods(documents):
        named = [(*REFERENCES[word], value) for word, value in _words(pod.spec) if word in REFERENCES]
        wanted = [(kind, value[name]) for kind, name, value in named]
        wanted.append(("ServiceAccount", pod.spec.get("serviceAccountName")))
        yield from (f"{pod.name}: {kind}/{name}" for kind, name in wanted if (kind, name) not in known)
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | claims
        mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        yield from (f"{pod.name}: volume {name}" for name in sorted(mounted - volumes))


@rule
def redis_keeps_what_it_confirms(documents: list[Document]) -> Iterator[str]:
    for document in [each for each in documents if "redis.conf" in each.get("data", {})]:
        name = document["metadata"]["name"]
        settings = dict(line.split(maxsplit=1) for line in document["data"]["redis.conf"].strip().splitlines())
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction"}
        if name.endswith("redis-jobs"):
            wanted["appendfsync"] = "always"
        yield from (f"{name}: {word}" for word, value in wanted.items() if settings.get(word) != value)
        stateful = find(documents, "StatefulSet", name)["spec"]
        (container,) = stateful["template"]["spec"]["containers"]
        share = int(settings["maxmemory"].removesuffix("mb")) / _mebibytes(container["resources"]["limits"]["memory"])
        if not 0.65 <= share <= 0.7:
            yield f"{name}: maxmemory is {share:.0%} of its limit"
        if not stateful.get("volumeClaimTemplates"):
            yield f"{name}: no volume"
        if "requirepass" not in container["args"][0]:
            yield f"{name}: no password"


@rule
def kuberay_takes_the_service(documents: list[Document]) -> Iterator[str]:
    """KubeRay's operator refuses more than its definition's schema does, in its validation.go."""
    for document in [each for each in documents if each["kind"] == "RayService"]:
        name, cluster = document["metadata"]["name"], document["spec"]["rayClusterConfig"]
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?", name):
            yield f"{name}: not a name of at most 41 letters"
        head = cluster["headGroupSpec"]
        for group in [head, *cluster.get("workerGroupSpecs", [])]:
            params = {"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"])
            if params and group.get("resources"):
                yield f"{name}/{group.get('groupName', 'head')}: resources in two places"
            restart = group["template"]["spec"].get("restartPolicy", "Never")
            if cluster["enableInTreeAutoscaling"] and restart != "Never":
                yield f"{name}/{group.get('groupName', 'head')}: restartPolicy beside the autoscaler"
        variables = {variable["name"] for variable in head["template"]["spec"]["containers"][0].get("env", [])}
        taken = variables & {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"}
        yield from (f"{name}: {variable} is KubeRay's own" for variable in sorted(taken))


@rule
def a_role_is_for_named_objects(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        for allowed in document["rules"] if document["kind"] == "Role" else ():
            if not allowed.get("resourceNames") or "*" in [*allowed["resources"], *allowed["verbs"]]:
                yield f"{document['metadata']['name']}: {allowed}"


@rule
def what_cannot_be_made_again_outlives_the_release(documents: list[Document]) -> Iterator[str]:
    """Without its pepper every API key is worthless, and an account's key is shown once."""
    for document in [each for each in documents if each["kind"] == "Secret"]:
        if document["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep":
            yield document["metadata"]["name"]


def _has(node: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether a mapping has these names with these values, at any depth."""
    return all(
        _has(node.get(name) or {}, cast(dict[str, Any], value)) if isinstance(value, dict) else node.get(name) == value
        for name, value in part.items()
    )


def _words(node: Any) -> Iterator[tuple[str, Any]]:
    """Every name below a node, with its value."""
    if isinstance(node, dict):
        yield from cast(dict[str, Any], node).items()
        node = [*cast(dict[str, Any], node).values()]
    for each in cast(list[Any], node) if isinstance(node, list) else ():
        yield from _words(each)


def _containers(documents: list[Document]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each container, with the names of its pod and its own."""
    for pod in pods(documents):
        yield from ((f"{pod.name}/{container['name']}", container) for container in pod.containers)


def _is_secret(name: str, value: object) -> bool:
    text = str(value or "")
    refers = text.startswith("$(") or value is None
    return (bool(SECRET_WORDS.search(name)) and not refers) or bool(URL_PASSWORD.search(text))


def _selectors(document: Document) -> Iterator[dict[str, Any]]:
    match document["kind"]:
        case "Service":
            yield {"matchLabels": document["spec"]["selector"]}
        case "PodDisruptionBudget":
            yield document["spec"]["selector"]
        case "NetworkPolicy":
            yield document["spec"]["podSelector"]
            rules = [*document["spec"].get("ingress", []), *document["spec"].get("egress", [])]
            peers = [peer for allowed in rules for peer in [*allowed.get("from", []), *allowed.get("to", [])]]
            yield from (peer["podSelector"] for peer in peers if "podSelector" in peer and len(peer) == 1)
        case _:
            pass


def _selects(selector: dict[str, Any], pod: Pod) -> bool:
    return all(pod.labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _mebibytes(quantity: str) -> float:
    return float(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]
