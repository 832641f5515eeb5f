"""The pods that a set of manifests makes, wherever their templates are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.manifests.chart import Document


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    labels: dict[str, str]
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
        case "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            yield f"{name}/head", _ray_template(cluster["headGroupSpec"], cluster)
            for group in cluster.get("workerGroupSpecs", []):
                yield f"{name}/{group['groupName']}", _ray_template(group, cluster)
        case _:
            pass


def _ray_template(group: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    """The template as KubeRay completes it: its own labels, and the autoscaler beside the head."""
    template = group["template"]
    labels = {**template["metadata"]["labels"], "ray.io/is-ray-node": "yes"}
    spec = template["spec"]
    if "groupName" not in group and cluster["enableInTreeAutoscaling"]:
        options = {key: value for key, value in cluster["autoscalerOptions"].items() if key in _AUTOSCALER_FIELDS}
        autoscaler = {"name": "autoscaler", "image": spec["containers"][0]["image"], **options}
        spec = {**spec, "containers": [*spec["containers"], autoscaler]}
    return {"metadata": {"labels": labels}, "spec": spec}


_AUTOSCALER_FIELDS = ("imagePullPolicy", "resources", "securityContext", "volumeMounts", "env", "envFrom")


def _pod(name: str, template: dict[str, Any]) -> Pod:
    return Pod(name, template["metadata"]["labels"], template["spec"])
