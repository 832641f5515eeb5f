"""The pods that a set of manifests makes, wherever their templates are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.manifests.chart import Document


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")


def pods(documents: list[Document]) -> list[Pod]:
    return [_pod(name, template) for document in documents for name, template in templates(document)]


def templates(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pod template of an object, with a name for it."""
    name = f"{document['kind']}/{document['metadata']['name']}"
    match document["kind"]:
        case "StatefulSet" | "Deployment" | "Job":
            yield name, document["spec"]["template"]
        case "CronJob":
            yield name, document["spec"]["jobTemplate"]["spec"]["template"]
        case "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            yield f"{name}/head", _ray_template(cluster["headGroupSpec"], cluster)
            for group in cluster.get("workerGroupSpecs", []):
                yield f"{name}/{group['groupName']}", _ray_template(group, cluster)
        case _:
            pass


def _ray_template(group: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    """The template as KubeRay 1.7 completes it.

    It adds labels of its own, the head's autoscaler, and to workers an init container that waits for the head,
    like the ray container, but without its `envFrom`.
    """
    template = group["template"]
    labels = {**template["metadata"]["labels"], "ray.io/is-ray-node": "yes"}
    spec = template["spec"]
    if "groupName" not in group and cluster["enableInTreeAutoscaling"]:
        options = {key: value for key, value in cluster["autoscalerOptions"].items() if key in _AUTOSCALER_FIELDS}
        autoscaler = {"name": "autoscaler", "image": spec["containers"][0]["image"], **options}
        spec = {**spec, "containers": [*spec["containers"], autoscaler]}
    if "groupName" in group:
        copied = {key: value for key, value in spec["containers"][0].items() if key in _WAIT_FIELDS}
        wait = {**copied, "name": WAIT_FOR_HEAD, "resources": {"requests": _WAIT_SIZE, "limits": _WAIT_SIZE}}
        spec = {**spec, "initContainers": [*spec.get("initContainers", []), wait]}
    return {"metadata": {**template["metadata"], "labels": labels}, "spec": spec}


WAIT_FOR_HEAD = "wait-gcs-ready"
_WAIT_SIZE = {"cpu": "200m", "memory": "256Mi"}
_WAIT_FIELDS = ("image", "imagePullPolicy", "securityContext", "env", "volumeMounts")
_AUTOSCALER_FIELDS = ("imagePullPolicy", "resources", "securityContext", "volumeMounts", "env", "envFrom")


def _pod(name: str, template: dict[str, Any]) -> Pod:
    metadata = template["metadata"]
    return Pod(name, metadata["labels"], metadata.get("annotations") or {}, template["spec"])
