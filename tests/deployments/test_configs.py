"""Every shipped Serve file is valid for Serve's schema and for our strict args."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
from ray.serve.schema import ServeDeploySchema

from deployments.app import assemble, assemble_group, build, build_group
from deployments.args import AppArgs, GroupArgs
from deployments.config import ConfigError, ServeConfig, read_config
from serve_app.domain.requests import Variant
from serve_app.loras.catalog_file import read_catalog
from serve_app.settings import Settings
from tests.support import ROOT, existing

CONFIGS = ROOT / "configs"
SERVE_FILES = ("local.yaml", "one_gpu.yaml", "production.yaml")


@pytest.mark.parametrize("name", SERVE_FILES)
def test_a_shipped_config_is_valid_for_serve_and_for_us(name: str) -> None:
    content = yaml.safe_load((CONFIGS / name).read_text())
    assert read_config(CONFIGS / name) == ServeConfig.model_validate(content)
    schema = ServeDeploySchema.model_validate(content)
    application, *groups = schema.applications
    assert application.import_path == "deployments.app:build"
    for group in groups:
        assert (group.import_path, group.route_prefix) == ("deployments.app:build_group", None)
        (generators,) = deployments_of(build_group(GroupArgs.model_validate(group.args)))
        assert generators._bound_deployment.name == "generator"
    args = AppArgs.model_validate(application.args)
    assert args.generator is not None
    built = build(args)
    names = {"ingress", "generator", "upscaler", "housekeeper"}
    assert {node._bound_deployment.name for node in deployments_of(built)} == names
    assert args.upscaler.weights, "Lanczos alone is for those who ask for it"
    assert schema.logging_config is not None
    assert not schema.logging_config.enable_access_log


@pytest.mark.parametrize(("log_format", "encoding"), [("text", "TEXT"), ("json", "JSON")])
def test_no_deployment_logs_its_requests(monkeypatch: pytest.MonkeyPatch, log_format: str, encoding: str) -> None:
    """It is so however the service is started, also by a file of one's own without a word on logging."""
    monkeypatch.setenv("ATELIER_LOG_FORMAT", log_format)
    for node in deployments_of(build(AppArgs())):
        logging_config = node._bound_deployment.logging_config
        assert logging_config["enable_access_log"] is False
        assert logging_config["encoding"] == encoding


def test_the_ingress_of_a_cluster_follows_its_load() -> None:
    """It scales by Serve's own policy, which HAProxy's replicas feed, and never to fewer than two."""
    shipped = read_config(CONFIGS / "production.yaml").main
    application = assemble(shipped.args, shipped.scaling)
    scaling = application._bound_deployment._deployment_config.autoscaling_config  # pyright: ignore[reportPrivateUsage]
    assert scaling is not None
    assert (scaling.min_replicas, scaling.target_ongoing_requests) == (2, 50)
    assert scaling.max_replicas > 2
    with pytest.raises(
        ValidationError, match="must be auto, with the range in `autoscaling_config` under `deployments:`"
    ):
        AppArgs.model_validate({"ingress": {"replicas": {"min_replicas": 2, "max_replicas": 3}}})


def test_the_ingress_itself_bounds_the_requests_that_it_takes() -> None:
    for asked in None, 5:
        words = {"ingress": {"max_ongoing_requests": asked}, "generator": {"engine": {"max_rank": 200}}}
        built: Any = build(AppArgs.model_validate(words))
        assert built._bound_deployment._deployment_config.max_ongoing_requests > 10_000, "half-sent bodies are open too"
        assert built._bound_deployment.init_kwargs == {
            "requests_at_once": asked,
            "requests_waiting": 1000,
            "max_rank": 200,
        }


def test_a_frozen_replica_of_any_deployment_is_replaced_within_30_s() -> None:
    """The bound follows from Serve's own count; `tests/faults/test_recovery.py` sees it happen."""
    for node in deployments_of(build(AppArgs())):
        config = node._bound_deployment._deployment_config
        missed = REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD * config.health_check_timeout_s
        assert config.health_check_period_s + missed < 26, "the rest is the time until its process has ended"


def deployments_of(node: Any) -> list[Any]:
    """A bound application and everything bound into it."""
    children = [child for child in node._bound_deployment.init_args if hasattr(child, "_bound_deployment")]
    return [node, *(found for child in children for found in deployments_of(child))]


def scaled(name: str, least: int, most: int) -> str:
    bounds = f"{{min_replicas: {least}, max_replicas: {most}}}"
    return f"applications: [{{deployments: [{{name: {name}, autoscaling_config: {bounds}}}]}}]"


def group(of: str, args: str = "", *, name: str = "") -> str:
    """Return applications of a Serve YAML: the main one, and that of a group."""
    fields = f"name: {name or of}, route_prefix: null, import_path: 'deployments.app:build_group'"
    return f"applications: [{{}}, {{{fields}, args: {{group: {of}{args}}}}}]"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http_options: {prot: 1}", "http_options.prot"),
        ("applications: [{args: {generator: {num_gpu: 1}}}]", "applications.0.args.generator.num_gpu"),
        ("applications: [{args: {generator: {replicas: 0}}}]", "applications.0.args.generator"),
        ("applications: [{args: {generator: {engine: {max_row: 4}}}}]", "engine.max_row: Unexpected keyword argument"),
        ("applications: [{args: {generator: {engine: {max_rows: many}}}}]", "args.generator.engine.max_rows"),
        ("applications: [{args: {generator: {engine: {max_rows: 1}}}}]", "max_rows: must be at least 2"),
        ("applications: [{args: {generator: {engine: {sampler: magic}}}}]", "sampler: must be one of"),
        ("applications: [{import_path: other:app}]", "applications.0.import_path"),
        ("applications: [{args: {generator: {replicas: auto}}}]", "generator has no autoscaling_config"),
        (scaled("ingress", 1, 2), "args.ingress.replicas: must be auto"),
        (
            scaled("generator", 0, 2),
            "so its autoscaling_config needs policy: {policy_function: 'deployments.scaling:Ba",
        ),
        (scaled("ingress", 0, 2), "never to zero"),
        (scaled("ingress", 3, 2), "min_replicas 3 is above max_replicas 2"),
        ("applications: [{args: {generator: {drain_s: .inf}}}]", "generator.drain_s: Input should be a finite number"),
        ("applications: [{args: {upscaler: {poll_s: 0}}}]", "upscaler.poll_s: Input should be greater than 0"),
        ("applications: [{args: {housekeeper: {every_s: 1.0e+12}}}]", "housekeeper.every_s: Input should be less than"),
        ("applications: [{args: {ingress: {resources: {ingress: -1}}}}]", "resources.ingress: Input should be greater"),
        ("applications: []", "exactly one must be of deployments.app:build"),
        (group("sdxl", ", replicas: 0"), "applications.1.args: Value error, replicas: at least 1"),
        (group("sdxl", ", engines: {}"), "applications.1.args.engines: Extra inputs"),
        (group("default"), "the group default is the generator of the main application"),
        (group("SDXL"), "applications.1.args.group: String should match"),
        (group("sdxl", name="xl"), "name: must be the group, sdxl"),
        (group("sdxl", name="sdxl, deployments: [{name: ingress}]"), "a group has a generator only, not ingress"),
        (group("sdxl", ", replicas: auto"), "args.replicas: auto, and generator has no autoscaling_config"),
        ("applications: [{}, {}]", "exactly one must be"),
        (f"{group('sdxl')[:-1]}, {group('sdxl').partition('{}, ')[2]}", "sdxl: two have this name"),
        (group("sdxl").replace("route_prefix: null, ", ""), "applications.1.route_prefix: Field required"),
        (
            "applications: [{args: {generator: null}, deployments: [{name: generator, autoscaling_config: "
            "{min_replicas: 0, max_replicas: 1}}]}]",
            "args.generator is null",
        ),
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


@pytest.mark.parametrize(("option", "value"), [("max_row", 4), ("max_rows", "many"), ("dtype", "float8"), ("exact", 3)])
def test_a_wrong_engine_option_stops_the_builder_by_name(option: str, value: object) -> None:
    """`serve run` and `serve deploy` call the builder like this: nothing is built, no replica starts."""
    with pytest.raises(ValidationError, match=option):
        call_user_app_builder_with_args_if_necessary(build, {"generator": {"engine": {option: value}}})


def test_a_fraction_of_a_card_caps_its_memory() -> None:
    args = AppArgs.model_validate({"generator": {"num_gpus": 0.7}, "upscaler": {"num_gpus": 1}})
    assert existing(args.generator).memory_share == 0.7
    assert args.upscaler.memory_share is None
    args = AppArgs.model_validate({"generator": {"num_gpus": 1, "memory_fraction": 0.9}})
    assert existing(args.generator).memory_share == 0.9


def test_a_group_scales_by_the_jobs_of_its_own_pool() -> None:
    """Its `args` are of its application alone: nothing of another application's version changes with them."""
    shipped = read_config(CONFIGS / "production.yaml")
    (own,) = shipped.groups
    built = assemble_group(own.args, own.scaling)
    policy = built._bound_deployment._deployment_config.autoscaling_config.policy  # pyright: ignore
    assert policy.policy_kwargs["kind"] == "generation.z-image"
    assert shipped.served_groups == {"default", "z-image"}
    assert [demand.deployment for demand in shipped.demands][-1] == "generator.z-image"
    alone = ServeConfig.model_validate({"applications": [{"args": {"generator": None}}]})
    assert alone.served_groups == set()
    names = {node._bound_deployment.name for node in deployments_of(build(alone.args))}
    assert names == {"ingress", "upscaler", "housekeeper"}


def test_the_shipped_catalog_is_whole() -> None:
    catalog = read_catalog(CONFIGS / "catalog.yaml")
    assert not catalog.set_aside
    assert len(catalog.adapters) == 8
    assert all(len(lora_id) == len("model_") + 26 for lora_id in catalog.adapters)
    assert all(Path(adapter.file).is_file() for adapter in catalog.adapters.values())


def test_the_example_plans_are_read(settings: Settings) -> None:
    table = settings.model_copy(update={"plans": CONFIGS / "plans.example.yaml"}).plan_table
    assert table[Variant.A, "studio"].limit == 5000
    assert table[Variant.B, "studio"].policy_name == "b-minute"
    assert table[Variant.A, "basic"].limit == 50
