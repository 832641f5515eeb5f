"""Rules that every pod and policy must keep, whatever the values.

A rule yields a sentence for each breach it finds.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.manifests.chart import Document, find
from tests.manifests.pods import Pod, pods

Rule = Callable[[list[Document]], Iterator[str]]
RULES: list[Rule] = []

SECRET_WORDS = re.compile(r"PASSWORD|SECRET|TOKEN|PEPPER|SIGNING|PRIVATE|CREDENTIAL", re.IGNORECASE)
URL_PASSWORD = re.compile(r"://[^/@]*:(?!\$\()[^/@]+@")
TOKEN_HOLDERS = {"head", "account-job"}
"""The autoscaler resizes the cluster, and the account job fills in a Secret; no other pod speaks to Kubernetes' API."""


def broken_rules(documents: list[Document]) -> list[str]:
    return [f"{rule.__name__}: {breach}" for rule in RULES for breach in rule(documents)]


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


@rule
def no_pod_runs_as_root(documents: list[Document]) -> Iterator[str]:
    for pod in pods(documents):
        context = pod.spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("runAsUser", 0) == 0:
            yield pod.name
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.name}: no seccomp profile"
    for where, container in _containers(documents):
        if container.get("securityContext", {}).get("runAsUser") == 0:
            yield where


@rule
def no_container_has_a_privilege(documents: list[Document]) -> Iterator[str]:
    wanted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    for where, container in _containers(documents):
        context = container.get("securityContext", {})
        if context.get("privileged") or {**context, **wanted} != context:
            yield f"{where}: {context}"


@rule
def no_pod_reaches_into_its_node(documents: list[Document]) -> Iterator[str]:
    for pod in pods(documents):
        yield from (f"{pod.name}: {word}" for word in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(word))
        yield from (f"{pod.name}: hostPath" for volume in pod.spec.get("volumes", []) if "hostPath" in volume)
        for container in pod.containers:
            yield from (f"{pod.name}: hostPort" for port in container.get("ports", []) if "hostPort" in port)


@rule
def no_pod_has_links_to_services(documents: list[Document]) -> Iterator[str]:
    """They look like settings: `ATELIER_PORT` of a service called `atelier`."""
    yield from (pod.name for pod in pods(documents) if pod.spec.get("enableServiceLinks") is not False)


@rule
def every_container_has_requests_and_limits(documents: list[Document]) -> Iterator[str]:
    for where, container in _containers(documents):
        for kind in ("requests", "limits"):
            missing = {"cpu", "memory"} - set(container.get("resources", {}).get(kind, {}))
            yield from (f"{where}: no {name} in {kind}" for name in sorted(missing))


@rule
def every_image_names_its_version(documents: list[Document]) -> Iterator[str]:
    for where, container in _containers(documents):
        _, _, tag = container["image"].rpartition("/")[2].partition(":")
        if tag in ("", "latest"):
            yield f"{where}: {container['image']}"


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
def each_pod_gets_the_secrets_it_needs(documents: list[Document]) -> Iterator[str]:
    """Pods that draw images need the pepper for the images' names; only the ingress signs addresses."""
    for pod in pods(documents):
        names = {variable["name"] for container in pod.containers for variable in container.get("env", [])}
        serves = any(port["name"] == "serve" for port in pod.spec["containers"][0].get("ports", []))
        if "ATELIER_SIGNING_KEYS" in names and not serves:
            yield f"{pod.name}: signing keys"
        if "ATELIER_PEPPER" in names and "ATELIER_REDIS_URL" not in names:
            yield f"{pod.name}: a pepper without a use"


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
        types = {
            direction
            for policy in policies
            if _selects(policy["podSelector"], pod)
            for direction in policy["policyTypes"]
        }
        yield from (f"{pod.name}: {missing}" for missing in sorted({"Ingress", "Egress"} - types))


@rule
def no_network_policy_opens_to_everyone(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] != "NetworkPolicy":
            continue
        name = document["metadata"]["name"]
        for allowed in document["spec"].get("ingress", []):
            for peer in allowed.get("from") or [{}]:
                if not peer or peer.get("namespaceSelector") == {} or "ipBlock" in peer:
                    yield f"{name}: from anywhere"
                if "namespaceSelector" in peer and not allowed.get("ports"):
                    yield f"{name}: another namespace on every port"
        for allowed in document["spec"].get("egress", []):
            for peer in allowed.get("to") or [{}]:
                if (not peer or "ipBlock" in peer) and not allowed.get("ports"):
                    yield f"{name}: to anywhere on every port"


@rule
def every_selector_finds_a_pod(documents: list[Document]) -> Iterator[str]:
    everyone = pods(documents)
    for document in documents:
        for selector in _selectors(document):
            if not any(_selects(selector, pod) for pod in everyone):
                yield f"{document['kind']}/{document['metadata']['name']}: {selector}"


@rule
def every_reference_is_kept(documents: list[Document]) -> Iterator[str]:
    """ConfigMaps, claims and service accounts are in the set; Secrets may be the operator's own."""
    known = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for pod in pods(documents):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for volume in volumes.values():
            for kind, key, word in _VOLUME_REFERENCES:
                if key in volume and (kind, volume[key][word]) not in known:
                    yield f"{pod.name}: {kind}/{volume[key][word]}"
        for container in pod.containers:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            yield from (f"{pod.name}: volume {name}" for name in sorted(mounted - set(volumes) - _claims(documents)))
            sources = [source["configMapRef"] for source in container.get("envFrom", []) if "configMapRef" in source]
            for source in sources:
                if ("ConfigMap", source["name"]) not in known:
                    yield f"{pod.name}: ConfigMap/{source['name']}"
        if ("ServiceAccount", pod.spec.get("serviceAccountName")) not in known:
            yield f"{pod.name}: ServiceAccount/{pod.spec.get('serviceAccountName')}"


@rule
def redis_keeps_what_it_confirms(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        settings = dict(
            line.split(maxsplit=1) for line in document.get("data", {}).get("redis.conf", "").strip().splitlines()
        )
        if not settings:
            continue
        name = document["metadata"]["name"]
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction"}
        if name.endswith("redis-jobs"):
            wanted["appendfsync"] = "always"
        yield from (f"{name}: {word}" for word, value in wanted.items() if settings.get(word) != value)
        stateful = find(documents, "StatefulSet", name)["spec"]
        (container,) = stateful["template"]["spec"]["containers"]
        limit = container["resources"]["limits"]["memory"]
        share = int(settings.get("maxmemory", "0mb").removesuffix("mb")) / _mebibytes(limit)
        if not 0.65 <= share <= 0.7:
            yield f"{name}: maxmemory is {share:.0%} of its limit"
        if not stateful.get("volumeClaimTemplates"):
            yield f"{name}: no volume"
        if "requirepass" not in container["args"][0]:
            yield f"{name}: no password"


@rule
def kuberay_takes_the_service(documents: list[Document]) -> Iterator[str]:
    """KubeRay's operator refuses more than its definition's schema does, in its validation.go."""
    for document in documents:
        if document["kind"] != "RayService":
            continue
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
    for document in documents:
        metadata = document["metadata"]
        is_helms = metadata.get("labels", {}).get("app.kubernetes.io/managed-by") == "Helm"
        is_kept = metadata.get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        if document["kind"] == "Secret" and is_helms and not is_kept:
            yield metadata["name"]


_VOLUME_REFERENCES = (
    ("ConfigMap", "configMap", "name"),
    ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
)


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


def _claims(documents: list[Document]) -> set[str]:
    """Names of volumes that stateful sets make for themselves."""
    sets = [document for document in documents if document["kind"] == "StatefulSet"]
    return {claim["metadata"]["name"] for stateful in sets for claim in stateful["spec"]["volumeClaimTemplates"]}


def _mebibytes(quantity: str) -> float:
    return float(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]
