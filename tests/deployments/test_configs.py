"""Every YAML that ships: Serve's own schema, our args with unknown words refused, and KubeRay's CRD, strictly."""

import copy
import os
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments.app import build
from deployments.args import AppArgs, ScaleArgs
from deployments.config import ConfigError, ServeConfig, read_config
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.stores.catalog import CatalogStore
from serve_app.stores.redis import connect
from tests.support import ROOT

CONFIGS = ROOT / "configs"
SERVE_FILES = ("local.yaml", "one_gpu.yaml", "production.yaml")
MANIFEST = CONFIGS / "kuberay" / "rayservice.yaml"
CRD = os.environ.get("KUBERAY_CRD", "")


def manifests() -> dict[str, dict[str, Any]]:
    """The manifest's documents by kind and name."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def serve_configs() -> dict[str, dict[str, Any]]:
    configs = {name: yaml.safe_load((CONFIGS / name).read_text()) for name in SERVE_FILES}
    return {**configs, "rayservice.yaml": yaml.safe_load(manifests()["RayService/atelier"]["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", [*SERVE_FILES, "rayservice.yaml"])
def test_a_shipped_config_is_valid_for_serve_and_for_us(name: str) -> None:
    content = serve_configs()[name]
    schema = ServeDeploySchema.model_validate(content)
    (application,) = schema.applications
    assert application.import_path == "deployments.app:build"
    args = AppArgs.model_validate(application.args)
    built = build(args)
    names = {"ingress", "generator", "upscaler", "housekeeper"}
    assert {node._bound_deployment.name for node in deployments_of(built)} == names  # pyright: ignore[reportPrivateUsage]
    for replicas in (args.generator.replicas, args.upscaler.replicas):
        if isinstance(replicas, ScaleArgs):
            AutoscalingConfig(**replicas.model_dump(exclude={"target_s"}))


def deployments_of(node: Any) -> list[Any]:
    """A bound application and everything bound into it."""
    children = [child for child in node._bound_deployment.init_args if hasattr(child, "_bound_deployment")]
    return [node, *(found for child in children for found in deployments_of(child))]


@pytest.mark.parametrize("name", ["local.yaml", "one_gpu.yaml"])
def test_up_takes_the_one_machine_configs(name: str) -> None:
    assert read_config(CONFIGS / name) == ServeConfig.model_validate(serve_configs()[name])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http_options: {prot: 1}", "http_options.prot"),
        ("applications: [{args: {generator: {num_gpu: 1}}}]", "applications.0.args.generator.num_gpu"),
        ("applications: [{args: {generator: {replicas: 0}}}]", "applications.0.args.generator"),
        ("applications: [{import_path: other:app}]", "applications.0.import_path"),
        ("applications: [", "not YAML"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert place in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bounds_out_of_order_are_refused() -> None:
    """Serve's own schema takes them."""
    with pytest.raises(ValidationError, match="min_replicas 5 is above max_replicas 2"):
        ScaleArgs(min_replicas=5, max_replicas=2)


def test_a_fraction_of_a_card_caps_its_memory() -> None:
    args = AppArgs.model_validate({"generator": {"num_gpus": 0.7}, "upscaler": {"num_gpus": 1}})
    assert args.generator.memory_share == 0.7
    assert args.upscaler.memory_share is None
    assert AppArgs.model_validate({"generator": {"num_gpus": 1, "memory_fraction": 0.9}}).generator.memory_share == 0.9


async def test_the_shipped_catalog_is_whole(settings: Settings, redis_url: str) -> None:
    client = connect(redis_url)
    catalog = CatalogStore(client, settings.model_copy(update={"catalog": CONFIGS / "catalog.yaml"}))
    await client.aclose()
    assert len(catalog.all()) == 8
    assert all(len(adapter.id) == len("model_") + 26 for adapter in catalog.all())


def test_the_example_plans_are_read(settings: Settings) -> None:
    table = settings.model_copy(update={"plans": CONFIGS / "plans.example.yaml"}).plan_table
    assert table[Variant.A, "studio"].limit == 5000
    assert table[Variant.B, "studio"].policy_name == "b-minute"
    assert table[Variant.A, "basic"].limit == 50


@pytest.mark.skipif(not CRD, reason="set KUBERAY_CRD to ray.io_rayservices.yaml of KubeRay 1.7 to check the manifest")
def test_the_rayservice_fits_kuberays_definition() -> None:
    checker = crd_checker()
    service = manifests()["RayService/atelier"]
    assert [error.message for error in checker.iter_errors(service)] == []
    typo = copy.deepcopy(service)
    typo["spec"]["rayClusterConfig"]["gcsFaultTolerance"] = {}
    assert list(checker.iter_errors(typo)), "a check that cannot fail checks nothing"


def test_the_manifest_hangs_together() -> None:
    found = manifests()
    cluster = found["RayService/atelier"]["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    args = AppArgs.model_validate(serve_configs()["rayservice.yaml"]["applications"][0]["args"])
    assert groups["gpu"]["template"]["spec"]["terminationGracePeriodSeconds"] > args.generator.drain_s
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert found["ConfigMap/atelier-environment"]["data"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    redis_args = found["StatefulSet/redis-jobs"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert redis_args[:4] == ["--appendonly", "yes", "--appendfsync", "always"]
    open_ports = [rule["ports"] for rule in found["NetworkPolicy/atelier"]["spec"]["ingress"] if "from" not in rule]
    assert open_ports == [[{"port": 8000, "protocol": "TCP"}]]


def crd_checker() -> jsonschema.Draft7Validator:
    """The CRD's own schema, made to refuse unknown fields, as `kubectl --validate=strict` does."""
    versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    closed = close(schema)
    closed["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(closed)


def close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [close(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    node = {key: close(value) for key, value in cast(dict[str, Any], schema).items()}
    if node.get("x-kubernetes-int-or-string"):
        node["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(node.get("type"), str):
        node["type"] = [node["type"], "null"]
    is_open = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if node.get("type") == "object" and "properties" in node and not is_open:
        node["additionalProperties"] = False
    return node
