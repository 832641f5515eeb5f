"""Further groups of base models: each is an application of the Serve configuration with worker groups of its own."""

from typing import Any

import helm_python
import pytest
import yaml

from deployments.config import ServeConfig
from tests.manifests.chart import Document, find, merge, profile_values, render, rendered, serve_config
from tests.manifests.rules import broken_rules
from tests.manifests.schemas import mistakes
from tests.support import ROOT

SHIPPED = yaml.safe_load((ROOT / "configs" / "production.yaml").read_text())["applications"]
MANY_GPUS = profile_values("many-gpus")
Z_IMAGE = MANY_GPUS["workerGroups"]["z-image"]
SDXL, TURBO = MANY_GPUS["catalog"]["base_models"]
KLEIN = {"id": "klein", "folder": "/models/klein", "group": "flux"}
FLUX: dict[str, Any] = {
    "serve": {"groups": {"flux": {"args": {"drain_s": 90}, "scaling": {"generator": {"max_replicas": 2}}}}},
    "catalog": {"base_models": [SDXL, TURBO, KLEIN]},
    "workerGroups": {
        "dit": {**Z_IMAGE, "places": {"flux": 1}, "maxReplicas": 2, "gpuResource": "nvidia.com/mig-3g.40gb"}
    },
}
"""A group that configs/production.yaml does not have; its worker group has another name."""


def production(*changes: dict[str, Any]) -> list[Document]:
    values = profile_values("production")
    for change in changes:
        values = merge(values, change)
    return render(values)


def applications(documents: list[Document]) -> dict[str, Any]:
    content = serve_config(documents)
    ServeConfig.model_validate(content)
    return {each["name"]: each for each in content["applications"]}


@pytest.mark.parametrize(
    ("group", "pods", "card"),
    [("z-image", "z-image", "nvidia.com/gpu"), ("flux", "dit", "nvidia.com/mig-3g.40gb")],
)
def test_its_pods_wait_for_models_and_have_a_disk_for_adapters_as_other_generators_do(
    group: str, pods: str, card: str
) -> None:
    documents = production(FLUX)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    assert broken_rules(documents) == []
    groups = {
        each["groupName"]: each
        for each in find(documents, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert groups[pods]["resources"].items() >= {group: "1", "GPU": "1"}.items()
    own, other = (groups[name]["template"]["spec"] for name in (pods, "generation"))
    assert own["volumes"] == other["volumes"]
    assert [each["name"] for each in own["initContainers"]] == ["node-certificate", "wait-for-models"]
    asked = own["containers"][0]["resources"]["requests"]
    assert asked["ephemeral-storage"] == other["containers"][0]["resources"]["requests"]["ephemeral-storage"]
    assert asked[card] == "1"


def test_it_is_there_where_pods_have_its_place() -> None:
    for profile in ("one-gpu", "cpu-demo"):
        assert applications(rendered(profile)).keys() == {"atelier"}, profile
    main, z_image = SHIPPED
    deployed = applications(production(FLUX))
    assert deployed["atelier"] == main
    assert deployed["z-image"] == z_image
    assert applications(production())["z-image"] == z_image
    (scaled,) = deployed["flux"]["deployments"]
    assert scaled["autoscaling_config"]["policy"]["policy_kwargs"]["kind"] == "generation.flux"
    assert scaled["autoscaling_config"]["max_replicas"] == 2
    own = {"group": "flux", "resources": {"flux": 1}, "drain_s": 90}
    assert deployed["flux"]["args"] == {**z_image["args"], **own}, "like the last of the file, but for what values say"


def test_a_change_of_it_rolls_no_other() -> None:
    before = applications(production())
    change = {"args": {"drain_s": 60}, "scaling": {"generator": {"max_replicas": 1}}}
    after = applications(production({"serve": {"groups": {"z-image": change}}}))
    assert after["z-image"]["args"] == {**before["z-image"]["args"], "drain_s": 60}
    assert after["z-image"]["deployments"][0]["autoscaling_config"]["max_replicas"] == 1
    assert after["atelier"] == before["atelier"]


def test_it_may_be_the_only_one() -> None:
    alone = {"args": {"generator": None}}
    documents = production({"serve": alone, "catalog": {"base_models": [TURBO]}, "workerGroups": {"generation": None}})
    content = ServeConfig.model_validate(serve_config(documents))
    assert content.served_groups == {"z-image"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workerGroups": {"dit": {"maxReplicas": 1}}}, "flux.scaling.generator.max_replicas: 2 replicas"),
        ({"workerGroups": {"z-image": {"maxReplicas": 3}}}, "z-image.scaling.generator.max_replicas: 4 replicas"),
        ({"serve": {"groups": {"fluxes": {}}}}, "serve.groups.fluxes: no pods are meant for it"),
        ({"serve": {"groups": {"generator": {}}}}, "invalid propertyName 'generator'"),
        ({"serve": {"groups": {"default": {}}}}, "invalid propertyName 'default'"),
        ({"serve": {"groups": {"flux": {"arg": {}}}}}, "'arg' not allowed"),
        ({"serve": {"groups": {"flux": {"args": {"num_gpu": 1}}}}}, "'num_gpu' not allowed"),
        ({"serve": {"groups": {"flux": {"args": {"resources": {"generator": 1}}}}}}, "flux.args.resources: ask"),
        ({"serve": {"groups": {"flux": {"args": {"num_gpus": 2}}}}}, "workerGroups.dit.places ask for 2 GPUs"),
        ({"serve": {"groups": {"flux": {"args": {"drain_s": 170}}}}}, "the 170 of serve.groups.flux.args.drain_s"),
        ({"serve": {"groups": {"flux": {"args": {"replicas": 1}}}}}, "serve.groups.flux.scaling.generator: needs"),
        ({"workerGroups": {"dit": {"places": {"fluxes": 1}}}}, "workerGroups.dit.places: 'fluxes' not allowed"),
        ({"catalog": {"base_models": [SDXL, TURBO]}}, "no base model is of the group flux"),
        ({"catalog": {"base_models": [TURBO, KLEIN]}}, "leave out them, by `serve.args.generator: null`"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        production(FLUX, change)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ("dit", "serve.groups.flux: no pods are meant for it"),
        ("z-image", "the base model z-image-turbo is of the group z-image, and no pods are meant for it"),
    ],
)
def test_a_group_without_pods_is_refused(pods: str, message: str) -> None:
    values = merge(profile_values("production"), FLUX)
    values["workerGroups"] = {name: group for name, group in values["workerGroups"].items() if name != pods}
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)
