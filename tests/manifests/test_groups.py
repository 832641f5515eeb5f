"""Further applications of the Serve configuration, with generators for other base models, have worker groups of their own."""

from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.manifests.chart import CHART, Document, copy_of_the_chart, find, merge, profile_values, render, serve_config
from tests.manifests.rules import broken_rules
from tests.manifests.schemas import mistakes

PLACE = {"painting": 1}
SCALING = {"policy_function": "deployments.scaling:BacklogPolicy", "policy_kwargs": {"kind": "generation"}}
APPLICATION: dict[str, Any] = {
    "name": "painting",
    "route_prefix": None,
    "import_path": "deployments.app:build_group",
    "deployments": [
        {"name": "generator", "autoscaling_config": {"min_replicas": 0, "max_replicas": 2, "policy": SCALING}}
    ],
    "args": {"group": "painting", "replicas": "auto", "num_gpus": 1, "num_cpus": 4, "resources": PLACE, "drain_s": 90},
}
GROUP: dict[str, Any] = {
    **yaml.safe_load((CHART / "values.yaml").read_text())["workerGroups"]["generation"],
    "places": PLACE,
    "maxReplicas": 2,
    "gpuResource": "nvidia.com/mig-3g.40gb",
}
VALUES = {"workerGroups": {"painting": GROUP}}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, whose Serve configuration has one more application."""
    folder = copy_of_the_chart(tmp_path_factory.mktemp("groups"))
    file = folder / "files" / "production.yaml"
    content = yaml.safe_load(file.read_text())
    content["applications"].append(APPLICATION)
    file.write_text(yaml.safe_dump(content))
    return folder


def rendered(chart: Path, **values: Any) -> list[Document]:
    return render(merge(merge(profile_values("production"), VALUES), values), folder=chart)


def applications(documents: list[Document]) -> dict[str, Any]:
    content = serve_config(documents)
    ServeDeploySchema.model_validate(content)
    return {each["name"]: each for each in content["applications"]}


def test_its_pods_wait_for_models_and_have_a_disk_for_adapters_as_other_generators_do(chart: Path) -> None:
    documents = rendered(chart)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    assert broken_rules(documents) == []
    groups = {
        each["groupName"]: each
        for each in find(documents, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert groups["painting"]["resources"].items() >= {"painting": "1", "GPU": "1"}.items()
    own, other = (groups[name]["template"]["spec"] for name in ("painting", "generation"))
    assert own["volumes"] == other["volumes"]
    assert [each["name"] for each in own["initContainers"]] == ["node-certificate", "wait-for-models"]
    asked = own["containers"][0]["resources"]["requests"]
    assert asked["ephemeral-storage"] == other["containers"][0]["resources"]["requests"]["ephemeral-storage"]
    assert asked["nvidia.com/mig-3g.40gb"] == "1"


def test_it_is_changed_by_its_name_or_left_out(chart: Path) -> None:
    before = applications(rendered(chart))
    assert before["painting"] == APPLICATION
    change = {"args": {"drain_s": 60}, "scaling": {"generator": {"max_replicas": 1}}}
    after = applications(rendered(chart, serve={"groups": {"painting": change}}))
    assert after["painting"]["args"] == {**APPLICATION["args"], "drain_s": 60}
    assert after["painting"]["deployments"][0]["autoscaling_config"]["max_replicas"] == 1
    assert after["atelier"] == before["atelier"], "no replica of another application starts anew"
    left_out = {"serve": {"groups": {"painting": {"enabled": False}}}}
    assert applications(render(merge(profile_values("production"), left_out), folder=chart)).keys() == {"atelier"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"workerGroups": {"painting": {"maxReplicas": 1}}},
            "painting: 2 replicas at most, but the worker groups have",
        ),
        ({"serve": {"groups": {"paintings": {}}}}, "'paintings' not allowed"),
        ({"serve": {"groups": {"painting": {"arg": {}}}}}, "'arg' not allowed"),
        ({"serve": {"groups": {"painting": {"args": {"num_gpu": 1}}}}}, "'num_gpu' not allowed"),
        (
            {"serve": {"groups": {"painting": {"args": {"resources": {"generator": 1}}}}}},
            "painting.args.resources: ask",
        ),
        ({"serve": {"groups": {"painting": {"args": {"num_gpus": 2}}}}}, "painting: its places ask for 2 GPUs"),
        (
            {"serve": {"groups": {"painting": {"args": {"drain_s": 170}}}}},
            "the 170 of serve.groups.painting.args.drain_s",
        ),
        (
            {
                "serve": {
                    "groups": {"painting": {"args": {"replicas": 1}, "scaling": {"generator": {"max_replicas": 1}}}}
                }
            },
            "auto",
        ),
        ({"serve": {"groups": {"painting": {"enabled": False}}}}, "place 'painting' not allowed"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(chart: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(chart, **change)
    assert message in str(refused.value)
