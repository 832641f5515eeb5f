"""Every shipped installation of the chart renders, is valid, breaks no rule and serves configs/."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import helm_python
import pytest
import yaml
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from deployments.app import build
from deployments.config import ServeConfig
from deployments.proxy import WRAPPER
from deployments.requirements import TLS_FILES, of_proxy
from serve_app.api import images
from serve_app.api.body import MAX_BODY_BYTES
from serve_app.api.loras import routes as loras
from serve_app.api.multipart import FRAME_BYTES
from serve_app.api.openai import routes as openai
from serve_app.loras.sources import MAX_CONFIG_BYTES
from serve_app.settings import Settings
from serve_app.web.console import loras as console_loras
from serve_app.web.console import playground
from tests.manifests.chart import (
    CHART,
    PROFILES,
    Document,
    chart_beside_secret,
    find,
    merge,
    profile_values,
    render,
    rendered,
    serve_config,
)
from tests.manifests.pods import WAIT_FOR_HEAD, Pod, pods
from tests.manifests.rules import broken_rules
from tests.manifests.schemas import mistakes
from tests.support import ROOT

profiles = pytest.mark.parametrize("profile", PROFILES)


UPLOADED_TO = {"/v1/loras", "/v1/images", "/openai/", "/console/loras/new", "/console/pictures"}


def production(**values: Any) -> list[Document]:
    """The objects of the production installation with other values."""
    return render(merge(profile_values("production"), values))


def shared_environment(documents: list[Document]) -> dict[str, Any]:
    """What every pod has in its environment, as the head has it."""
    return {name: each["value"] for name, each in variables(ray_pods(documents)["head"]).items() if "value" in each}


def worker_groups(documents: list[Document]) -> dict[str, dict[str, Any]]:
    cluster = find(documents, "RayService")["spec"]["rayClusterConfig"]
    return {group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])}


def ray_pods(documents: list[Document]) -> dict[str, Pod]:
    return {pod.component: pod for pod in pods(documents) if pod.name.startswith("RayService/")}


def variables(pod: Pod) -> dict[str, Any]:
    return {variable["name"]: variable for variable in pod.spec["containers"][0]["env"]}


@profiles
def test_an_installation_is_valid_by_the_schema_of_each_kind_and_by_the_rules_and_helm_warns_of_nothing(
    profile: str,
) -> None:
    documents = rendered(profile)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    assert broken_rules(documents) == []
    report = helm_python.lint(CHART, profile_values(profile), strict=True, namespace="atelier")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


INGRESS: dict[str, Any] = {
    "gateway": {"enabled": False},
    "ingress": {
        "enabled": True,
        "host": "images.example.com",
        "tlsSecret": "tls",
        "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
    },
}


def test_a_typo_is_found_in_each_kind() -> None:
    documents = [*rendered("production"), *production(**INGRESS)]
    for document in [each for each in documents if each["kind"] != "RayService"]:
        assert mistakes(document) == []
        for part in (document, document.get("spec", {})):
            for word in part.keys() - {"apiVersion", "kind", "metadata", "spec"}:
                part[f"{word}s"] = part.pop(word)
                assert mistakes(document), f"{document['kind']}: {word}s"
                part[word] = part.pop(f"{word}s")


def test_a_typo_in_a_field_of_kuberay_or_of_its_pods_is_found() -> None:
    service = find(rendered("production"), "RayService")
    assert mistakes(service) == []
    cluster = service["spec"]["rayClusterConfig"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    for part, word in ((cluster, "gcsFaultToleranceOptions"), (container, "volumeMounts")):
        part[f"{word}s"] = part.pop(word)
        assert mistakes(service)
        part[word] = part.pop(f"{word}s")


def test_the_serve_configuration_is_the_production_file() -> None:
    """Nothing is added to it, and its pools are those that the worker groups make."""
    shipped = yaml.safe_load((ROOT / "configs" / "production.yaml").read_text())
    deployed = serve_config(rendered("many-gpus"))
    for config in (shipped, deployed):
        config["pools"].sort(key=lambda pool: pool["name"])
    assert deployed == shipped


@profiles
def test_serve_and_the_builder_take_the_configuration(profile: str) -> None:
    content = serve_config(rendered(profile))
    ServeDeploySchema.model_validate(content)
    config = ServeConfig.model_validate(content)
    assert config.pools, "without pools nothing was checked"
    assert config.http_options.host == "0.0.0.0"
    assert config.args.upscaler.weights, "an upscaler with weights in every shipped file"
    build(config.args)


@profiles
def test_a_pod_outlives_the_drains_of_its_deployments(profile: str) -> None:
    documents = rendered(profile)
    config = ServeConfig.model_validate(serve_config(documents))
    drains = {name: getattr(config.args, name).drain_s for name in ("ingress", "generator", "upscaler")}
    drains |= {each.name: each.args.drain_s for each in config.groups}
    for group in worker_groups(documents).values():
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        environment = variables(ray_pods(documents)[group["groupName"]])
        rays_own = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]["value"])
        assert max(drains[name] for name in drains.keys() & group["resources"]) <= rays_own < grace


def test_requests_of_customers_reach_no_gpu_pod() -> None:
    """The Service takes its port by name, and only ingress pods have one of that name."""
    documents = rendered("production")
    (port,) = find(documents, "RayService")["spec"]["serveService"]["spec"]["ports"]
    assert (port["targetPort"], port["name"]) == ("serve", "serve")
    named = {
        component
        for component, pod in ray_pods(documents).items()
        if "serve" in [port["name"] for port in pod.spec["containers"][0]["ports"]]
    }
    assert named == {"ingress", "head"}
    probes = {
        component: pod.spec["containers"][0].get("readinessProbe", {}).get("httpGet")
        for component, pod in ray_pods(documents).items()
    }
    of_ray = {"path": "/api/healthz", "port": 52365}
    assert probes.pop("ingress") == {"path": "/-/healthz", "port": "serve"}, "an ingress replica answers"
    assert probes == {"head": None, "generation": of_ray, "upscaling": of_ray, "z-image": of_ray}, (
        "KubeRay has the head's"
    )
    assert find(documents, "RayService")["spec"]["excludeHeadPodFromServeSvc"] is True


def test_a_pod_gets_the_secrets_of_its_deployments_and_no_other() -> None:
    found = {
        component: {name for name, variable in variables(pod).items() if "valueFrom" in variable}
        for component, pod in ray_pods(production(storage={"credentialsSecret": "bucket"})).items()
    }
    for name in ("ATELIER_PEPPERS", "ATELIER_WATERMARK_SECRET"):
        named = [each for pod in ray_pods(production()).values() for each in _named(pod.spec, name)]
        assert all(each["valueFrom"]["secretKeyRef"]["optional"] for each in named), "not everybody has it"
    worker = {"REDIS_JOBS_PASSWORD", "ATELIER_PEPPER", "ATELIER_PEPPERS", "ATELIER_WATERMARK_SECRET"}
    worker |= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert found == {
        "head": {"REDIS_JOBS_PASSWORD"},
        "generation": worker,
        "upscaling": worker,
        "z-image": worker,
        "ingress": worker | {"ATELIER_SIGNING_KEYS", "ATELIER_OPERATOR_TOKEN"},
    }


def test_the_head_may_only_read_in_redis(tmp_path: Path) -> None:
    """A Secret of an earlier version has no password for that: with it the head goes on as before."""
    values = profile_values("many-gpus")
    assert _redis_user_of_head(render(values)) == ("redis-scaler-password", "scaler")
    assert _redis_user_of_head(render(merge(values, {"redis": {"jobs": {"users": False}}}))) == ("redis-password", "")
    folder = chart_beside_secret(tmp_path, redis_password="c2VydmljZQ==")
    assert _redis_user_of_head(render(values, folder=folder)) == ("redis-password", "")
    texts = helm_python.Chart.load(folder).render(values, name="atelier", namespace="demo")
    assert "The Secret atelier-secrets lacks redis-scaler-password" in texts["atelier/templates/NOTES.txt"]


def _redis_user_of_head(documents: list[Document]) -> tuple[str, str]:
    """The Secret's key and the user in the address."""
    environment = variables(ray_pods(documents)["head"])
    user, _, _ = environment["ATELIER_REDIS_URL"]["value"].removeprefix("redis://").partition(":")
    return environment["REDIS_JOBS_PASSWORD"]["valueFrom"]["secretKeyRef"]["key"], user


OWN_REDIS = {"redis": {"jobs": {"enabled": False, "urlSecret": {"name": "redis", "key": "url"}}}}


def test_the_head_may_have_a_redis_user_of_its_own_elsewhere() -> None:
    def urls(**jobs: Any) -> dict[str, str]:
        found = ray_pods(production(**merge(OWN_REDIS, {"redis": {"jobs": jobs}})))
        sources = {component: variables(pod)["ATELIER_REDIS_URL"]["valueFrom"] for component, pod in found.items()}
        return {component: source["secretKeyRef"]["key"] for component, source in sources.items()}

    assert set(urls().values()) == {"url"}
    given = urls(scalerUrlSecret={"name": "redis", "key": "scaler"})
    assert given.pop("head") == "scaler"
    assert set(given.values()) == {"url"}


def test_whoever_asks_redis_reaches_one_elsewhere() -> None:
    def reach_it(**change: Any) -> set[str]:
        egress = {"egress": [{"cidr": "10.9.8.7/32", "ports": [6379]}]}
        policies = [each for each in production(networkPolicy=egress, **change) if each["kind"] == "NetworkPolicy"]
        return {each["metadata"]["name"] for each in policies if "10.9.8.7/32" in str(each["spec"]["egress"])}

    groups = {f"atelier-{name}" for name in worker_groups(rendered("production"))}
    workers = groups | {"atelier-models-job"}
    assert reach_it() == workers
    assert reach_it(**OWN_REDIS) == workers | {"atelier-head", "atelier-account-job"}


def test_only_the_edge_and_the_monitoring_reach_the_http_port() -> None:
    documents = rendered("production")
    policy = find(documents, "NetworkPolicy", "atelier-ingress")
    peers = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in policy["spec"]["ingress"]
        if {"port": 8000, "protocol": "TCP"} in rule.get("ports", [])
        for peer in rule["from"]
    ]
    assert peers == ["envoy-gateway-system", "monitoring"]
    generation = find(documents, "NetworkPolicy", "atelier-generation")["spec"]["ingress"]
    assert [rule["ports"] for rule in generation if "ports" in rule] == [[{"port": 8080, "protocol": "TCP"}]]


def test_every_pod_has_the_same_environment_of_its_own() -> None:
    documents = rendered("production")
    found = shared_environment(documents)
    shared = {name: value for name, value in found.items() if name != "ATELIER_REDIS_URL" and "_TLS" not in name}
    assert len(shared) > 30
    for pod in pods(documents):
        if not pod.component.startswith("redis-"):
            assert {name: each.get("value") for name, each in variables(pod).items()}.items() >= shared.items()
            assert not [each for each in pod.containers if "envFrom" in each], "another version's, during an upgrade"


def test_ray_speaks_encrypted_between_pods() -> None:
    """The CA's key is in the container that makes the certificate, and in no other."""
    documents = rendered("production")
    shared = shared_environment(documents)
    assert len(ray_pods(documents)) == 5
    for pod in ray_pods(documents).values():
        certificate, *others = pod.containers
        assert certificate["command"][:3] == ["python", "-m", "deployments.node_certificate"]
        environment = {name: variable["value"] for name, variable in variables(pod).items() if "value" in variable}
        assert not list(of_proxy(shared | environment | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER)}, spread=True))
        assert not [mount for other in others for mount in other["volumeMounts"] if mount["name"] == "ray-ca"]


def test_whoever_speaks_to_the_head_does_so_encrypted() -> None:
    """KubeRay's own containers do too: the autoscaler, and the one in which a worker waits for the head."""
    found: list[str] = []
    for pod in ray_pods(rendered("production")).values():
        for container in pod.containers:
            environment = {row["name"]: row.get("value", "") for row in container.get("env", [])}
            if environment.get("RAY_USE_TLS") == "1":
                found.append(container["name"])
                mounted = {Path(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
                assert {mounted.get(Path(environment[name]).parent) for name in TLS_FILES} == {"ray-tls"}
    assert sorted(found) == ["autoscaler", "ray-head", *["ray-worker"] * 4, *[WAIT_FOR_HEAD] * 4]


def test_without_it_the_operator_says_that_the_network_is_encrypted() -> None:
    documents = production(ray={"tls": {"enabled": False, "caSecret": ""}})
    assert shared_environment(documents)["ATELIER_NETWORK_ENCRYPTED"] == "true"
    assert not _named(documents, "RAY_USE_TLS")
    alone = rendered("cpu-demo")
    assert not _named(alone, "RAY_USE_TLS"), "one pod has nobody to speak to"
    assert "ATELIER_NETWORK_ENCRYPTED" not in shared_environment(alone)


def test_addresses_of_images_begin_with_what_customers_open() -> None:
    def address(**values: Any) -> str:
        return shared_environment(production(**values))["ATELIER_PUBLIC_URL"]

    assert address() == "https://images.example.com"
    assert address(**merge(INGRESS, {"ingress": {"host": "other.example.com"}})) == "https://other.example.com"
    assert address(publicUrl="https://cdn.example.com/") == "https://cdn.example.com"


BODY_SIZES = {
    "ingress-nginx": "nginx.ingress.kubernetes.io/proxy-body-size",
    "haproxy-ingress": "haproxy-ingress.github.io/proxy-body-size",
}


LIMITS = {
    "ingress-nginx": {
        "nginx.ingress.kubernetes.io/proxy-read-timeout": "60",
        "nginx.ingress.kubernetes.io/proxy-send-timeout": "60",
        "nginx.ingress.kubernetes.io/limit-connections": "64",
        "nginx.ingress.kubernetes.io/limit-rps": "50",
        "nginx.ingress.kubernetes.io/force-ssl-redirect": "true",
    },
    "haproxy-ingress": {
        "haproxy-ingress.github.io/timeout-server": "60s",
        "haproxy-ingress.github.io/limit-connections": "64",
        "haproxy-ingress.github.io/limit-rps": "50",
        "haproxy-ingress.github.io/ssl-redirect": "true",
    },
}
WHAT_TAKES_LONG = {
    "ingress-nginx": {
        "nginx.ingress.kubernetes.io/proxy-request-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-read-timeout": "600",
        "nginx.ingress.kubernetes.io/proxy-send-timeout": "600",
    },
    "haproxy-ingress": {"haproxy-ingress.github.io/timeout-server": "600s"},
}


@pytest.mark.parametrize("controller", BODY_SIZES)
def test_the_edge_lets_through_what_the_service_takes(controller: str) -> None:
    """The largest upload with its form passes where there are uploads, and little everywhere else."""
    edge = merge(INGRESS, {"ingress": {"controller": controller}})
    documents = production(**edge, limits={"loraMegabytes": 300})
    largest = Settings(max_lora_size=shared_environment(documents)["ATELIER_MAX_LORA_SIZE"]).max_lora_size
    form = MAX_CONFIG_BYTES + FRAME_BYTES
    by_path = {
        path["path"]: int(each["metadata"]["annotations"][BODY_SIZES[controller]].removesuffix("m")) << 20
        for each in documents
        if each["kind"] == "Ingress"
        for path in each["spec"]["rules"][0]["http"]["paths"]
    }
    uploads = by_path.keys() - {"/"}
    posts = [
        prefix + route.path
        for prefix, router in (
            ("", loras.router),
            ("", images.router),
            ("", openai.router),
            ("/console", console_loras.router),
            ("/console", playground.router),
        )
        for route in cast(list[APIRoute], router.routes)
        if "POST" in (route.methods or ())
    ]
    assert all(any(post.startswith(path) for post in posts) for path in uploads)
    assert uploads == UPLOADED_TO
    assert all(largest + form <= by_path[path] <= largest + (2 << 20) for path in uploads)
    assert MAX_BODY_BYTES <= by_path["/"] <= 2 << 20
    prefix, name = BODY_SIZES[controller].rsplit("/", 1)
    for each in documents:
        if each["kind"] == "Ingress":
            found = {key: value for key, value in each["metadata"]["annotations"].items() if key.startswith(prefix)}
            is_upload = each["metadata"]["name"].endswith("-uploads")
            long = WHAT_TAKES_LONG[controller] if is_upload else {}
            del found[f"{prefix}/{name}"]
            assert found == LIMITS[controller] | long
    issuers = [
        each["metadata"]["annotations"].get("cert-manager.io/cluster-issuer")
        for each in documents
        if each["kind"] == "Ingress"
    ]
    assert issuers == ["letsencrypt", None], "one of them asks for the certificate"


def test_a_gateway_does_not_cut_short_what_takes_long() -> None:
    """A gigabyte takes longer than a request may; so do an image of OpenAI's API, a call by MCP and a job's events."""
    *long, everything = find(rendered("production"), "HTTPRoute")["spec"]["rules"]
    by_method = {
        rule["matches"][0]["method"]: {each["path"]["value"]: each["path"]["type"] for each in rule["matches"]}
        for rule in long
    }
    posts = {path: "PathPrefix" if path in ("/openai/", "/console/pictures") else "Exact" for path in UPLOADED_TO}
    assert by_method == {
        "POST": posts | {"/mcp": "PathPrefix"},
        "GET": dict.fromkeys(("/v1/jobs/", "/files/", "/console/history/"), "PathPrefix"),
    }
    for rule in long:
        assert len(rule["matches"]) <= 8, "more are refused before version 1.1 of the Gateway API"
        assert set(rule["timeouts"].values()) == {"0s"}
    assert set(everything["timeouts"].values()) == {"60s"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imagee": {}}, "imagee"),
        ({"image": {"tag": "latest", "digest": ""}}, "/image/tag"),
        ({"image": {"digest": "sha256:0"}}, "/image/digest"),
        ({"workerGroups": {"generation": {"gpu": 1}}}, "'gpu' not allowed"),
        (
            {"workerGroups": {"generation": {"places": {"generators": 1}}}},
            "workerGroups.generation.places: 'generators' not allowed",
        ),
        ({"environment": {"ATELIER_PEPPER": "x"}}, "ATELIER_PEPPER"),
        ({"environment": {"ATELIER_WATERMARK_SECRET": "x"}}, "ATELIER_WATERMARK_SECRET"),
        ({"environment": {"ATELIER_MAX_LORA_SIZE": "2GiB"}}, "ATELIER_MAX_LORA_SIZE"),
        ({"limits": {"loraMegabytes": 4096}}, "loraMegabytes"),
        ({"models": {"downloads": [{"name": "sdxl", "repository": "a/b", "revision": "main"}]}}, "revision"),
        ({"redis": {"image": "valkey/valkey:latest"}}, "/redis/image"),
        ({"secrets": {"existingSecret": ""}}, "secrets.existingSecret"),
        ({"storage": {"url": ""}}, "storage.url: name the bucket"),
        ({"ray": {"tls": {"caSecret": ""}}}, "ray.tls.caSecret: name a Secret with a CA"),
        ({"storage": {"url": "file:///var/lib/images"}}, "several nodes need a bucket"),
        ({"publicUrl": "", "gateway": {"enabled": False}}, "publicUrl"),
        ({"gateway": {"tlsSecret": ""}}, "gateway.tlsSecret"),
        ({"gateway": {"controler": "none"}}, "'controler' not allowed"),
        (merge(INGRESS, {"ingress": {"tlsSecret": ""}}), "ingress.tlsSecret"),
        ({"models": {"persistence": {"enabled": False}}}, "models.persistence.enabled"),
        ({"redis": {"jobs": {"enabled": False}}}, "redis.jobs.urlSecret"),
        ({"redis": {"jobs": {"resources": {"limits": {"memory": "4096M"}}}}}, "memory"),
        ({"serve": {"args": {"generator": {"replicas": 9}}}}, "serve.args.generator.replicas: 9 replicas at most"),
        (
            {"serve": {"scaling": {"generator": {"max_replicas": 9}}}},
            "serve.scaling.generator.max_replicas: 9 replicas at most",
        ),
        (
            {"serve": {"scaling": {"generator": {"max_replicas": 2}}, "args": {"generator": {"replicas": 2}}}},
            "serve.scaling.generator: needs replicas: auto among its args",
        ),
        ({"serve": {"scaling": {"housekeeper": {"max_replicas": 2}}}}, "'housekeeper' not allowed"),
        ({"serve": {"args": {"generator": {"num_gpu": 1}}}}, "'num_gpu' not allowed"),
        ({"serve": {"args": {"generator": {"engine": {"max_row": 4}}}}}, "'max_row' not allowed"),
        ({"serve": {"args": {"upscaler": {"drain_s": -1}}}}, "/serve/args/upscaler/drain_s"),
        ({"serve": {"scaling": {"generator": {"max_replica": 2}}}}, "'max_replica' not allowed"),
        (
            {"serve": {"scaling": {"generator": {"min_replicas": 9}}}},
            "serve.scaling.generator.min_replicas 9 is above max_replicas 8",
        ),
        (
            {"serve": {"args": {"upscaler": {"num_gpus": 0.5}}}},
            "workerGroups.upscaling.places ask for 2 GPUs, a pod has 1",
        ),
        (
            {"serve": {"args": {"generator": {"num_cpus": 9}}}},
            "workerGroups.generation.places ask for 9 CPUs, a pod has 8",
        ),
        ({"serve": {"args": {"housekeeper": {"resources": {"housekeeper": 2}}}}}, "a place on the pods meant for it"),
        ({"workerGroups": {"upscaling": None}}, "serve.scaling.upscaler.max_replicas: 4 replicas at most"),
        (
            {"workerGroups": {"upscaling": {"minReplicas": 2}}},
            "workerGroups.upscaling.minReplicas 2 is above maxReplicas 1",
        ),
        ({"workerGroups": {"generation": {"podDisruptionBudget": {"maxUnavailable": 1}}}}, "podDisruptionBudget"),
        ({"workerGroups": {"ingress": {"podDisruptionBudget": {"minAvailable": "50%"}}}}, "podDisruptionBudget"),
        (
            {"serve": {"args": {"generator": {"drain_s": 170}}}},
            "workerGroups.generation.terminationGracePeriodSeconds 180 is less than",
        ),
        ({"ray": {"clusterDeletionDelaySeconds": 100}}, "clusterDeletionDelaySeconds 100 is less than the 120"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        production(**change)
    assert message in str(refused.value)


def test_no_worker_group_takes_the_name_of_other_pods() -> None:
    """Network policies select by it: a group named like the job would be let in as the job."""
    values = profile_values("production")
    spare = {**yaml.safe_load((CHART / "values.yaml").read_text())["workerGroups"]["ingress"], "minReplicas": 0}
    others = {pod.component for pod in pods(render(values))} - worker_groups(rendered("production")).keys()
    assert others == {"head", "redis-jobs", "redis-gcs", "models-job", "account-job"}
    render(merge(values, {"workerGroups": {"more": spare}}))
    for name in others:
        with pytest.raises(helm_python.HelmError, match=f"invalid propertyName '{name}'"):
            render(merge(values, {"workerGroups": {name: spare}}))


def test_a_drain_of_the_head_is_refused_by_name() -> None:
    with pytest.raises(helm_python.HelmError, match=r"head\.terminationGracePeriodSeconds 60 is less than"):
        render(merge(profile_values("cpu-demo"), {"serve": {"args": {"generator": {"drain_s": 50}}}}))
    find(render(merge(profile_values("cpu-demo"), {"serve": {"args": {"generator": {"drain_s": 45}}}})), "RayService")


@settings(max_examples=25, deadline=None)
@given(
    replicas=st.integers(1, 10),
    gpus=st.sampled_from([0.25, 0.3, 0.5, 0.7, 1]),
    nodes=st.integers(1, 5),
    places=st.integers(1, 4),
)
def test_the_chart_refuses_at_least_what_cannot_be_placed(replicas: int, gpus: float, nodes: int, places: int) -> None:
    """The chart's arithmetic agrees with the placement that `atelier up` checks by."""
    change: dict[str, Any] = {
        "serve": {
            "args": {"upscaler": {"num_gpus": gpus, "num_cpus": 0.1}},
            "scaling": {"upscaler": {"max_replicas": replicas}},
        },
        "workerGroups": {"upscaling": {"maxReplicas": nodes, "places": {"upscaler": places}}},
    }
    fits = places * gpus <= 1 and nodes * places >= replicas
    try:
        content = serve_config(render(merge(profile_values("many-gpus"), change)))
    except helm_python.HelmError:
        assert not fits
    else:
        assert fits
        ServeConfig.model_validate(content)


def test_what_is_drained_is_only_what_customers_need_at_once() -> None:
    """A share, or `maxUnavailable`, blocks every drain: Kubernetes asks the pods' owner for its scale."""
    budgets = [document for document in rendered("production") if document["kind"] == "PodDisruptionBudget"]
    of_redis = {"atelier-redis-jobs", "atelier-redis-gcs"}  # a StatefulSet has a scale
    of_ray = {row["metadata"]["name"]: row["spec"] for row in budgets if row["metadata"]["name"] not in of_redis}
    assert list(of_ray) == ["atelier-ingress"]
    assert of_ray["atelier-ingress"]["minAvailable"] == 1


def test_the_environment_is_written_once_and_the_operators_wins() -> None:
    def environment(**values: str) -> dict[str, str]:
        return shared_environment(production(environment=values))

    assert environment()["ATELIER_LOG_FORMAT"] == "json"
    shown = {"RAY_LOG_TO_STDERR": "1", "RAY_BACKEND_LOG_LEVEL": "warning", "RAY_LOGGER_LEVEL": "warning"}
    assert environment().items() >= shown.items(), "what `kubectl logs` shows"
    changed = environment(RAY_SERVE_HAPROXY_MAXCONN="30000", ATELIER_LOG_FORMAT="text")
    assert (changed["RAY_SERVE_HAPROXY_MAXCONN"], changed["ATELIER_LOG_FORMAT"]) == ("30000", "text")
    template = (CHART / "templates" / "_environment.tpl").read_text()
    written = re.findall(r"^([A-Z_]+):", template, re.MULTILINE)
    assert len(written) > 5
    for name in written:
        with pytest.raises(helm_python.HelmError, match=name):
            environment(**{name: "x"})


def test_every_pod_that_leaves_the_cluster_has_the_companys_proxy_and_authorities() -> None:
    backup = {"redis": {"jobs": {"backup": {"enabled": True, "url": "s3://copies"}}}}
    environment = {"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "store.example"}
    documents = production(**backup, environment=environment, trust={"configMap": "authorities"})
    shared = shared_environment(documents)
    assert shared["HTTPS_PROXY"] == environment["HTTPS_PROXY"]
    assert shared["NO_PROXY"] == "store.example,localhost,127.0.0.1,.svc,.cluster.local", "the API server is inside"
    assert {Path(shared[name]) for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")} == {
        Path("/etc/atelier-trust/ca-bundle.crt")
    }
    found = [pod for pod in pods(documents) if "SSL_CERT_FILE" in str(pod.spec)]
    assert {pod.component for pod in found} == {*ray_pods(documents), "account-job", "models-job", "redis-backup"}
    for pod in found:
        mounts = [each["volumeMounts"] for each in pod.containers if _named(each.get("env", []), "SSL_CERT_FILE")]
        assert all({"name": "trust", "mountPath": "/etc/atelier-trust", "readOnly": True} in each for each in mounts)
        assert {"name": "trust", "configMap": {"name": "authorities"}} in pod.spec["volumes"]
    assert "NO_PROXY" not in shared_environment(rendered("production"))


def test_limits_of_cpus_may_be_left_out() -> None:
    """Ray's own are then what is requested."""
    cpu = {"resources": {"limits": {"cpu": None}}}
    documents = production(head=cpu, workerGroups={"generation": cpu}, redis={"jobs": cpu})
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    generation = worker_groups(documents)["generation"]
    assert "cpu" not in generation["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert generation["resources"]["CPU"] == "8"


def test_a_packed_chart_is_the_folder_and_helm_has_nothing_to_say_of_either(tmp_path: Path) -> None:
    """A process of its own: Helm's library logs to its standard error."""
    program = f"""import helm_python
helm_python.package({str(CHART)!r}, destination={str(tmp_path)!r})
print(helm_python.lint({str(CHART)!r}, {{}}, strict=True)["errors"])"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    assert not re.findall("WARN.*|.*symbolic link.*", done.stderr)
    (packed,) = tmp_path.iterdir()
    assert packed.name == "atelier-0.1.0.tgz"
    values = profile_values("production")
    rendered_by = helm_python.Chart.load_archive(packed.read_bytes()).render(
        values, name="atelier", namespace="atelier"
    )
    assert rendered_by == helm_python.Chart.load(CHART).render(values, name="atelier", namespace="atelier")


def test_a_generation_pod_asks_for_the_disk_of_its_adapters() -> None:
    documents = production(models={"adapterCache": "20Gi"})
    assert shared_environment(documents)["ATELIER_WEIGHT_CACHE"] == f"{20 * 1024}MiB"
    asked = {
        component: pod.spec["containers"][0]["resources"]["requests"].get("ephemeral-storage")
        for component, pod in ray_pods(documents).items()
    }
    disk = f"{28 * 1024}Mi"
    assert asked == {"head": None, "ingress": None, "upscaling": None, "generation": disk, "z-image": disk}


def _notes(profile: str, **values: Any) -> str:
    chart, values = helm_python.Chart.load(CHART), merge(profile_values(profile), values)
    return chart.render(values, name="atelier", namespace="demo")["atelier/templates/NOTES.txt"]


def test_the_notes_say_where_customers_addresses_get_lost_and_name_further_groups() -> None:
    warning, notes = "limits.trustedProxies is empty", _notes("production")
    assert warning not in notes
    assert "Groups of base models with generators of their own, which draw before it is Ready too: z-image." in notes
    assert warning in _notes("production", limits={"trustedProxies": []})
    assert warning not in _notes("cpu-demo"), "nothing is in front"
    assert "Groups of base models" not in _notes("one-gpu")


def test_the_monitoring_has_the_token_that_the_ingress_pods_ask_for() -> None:
    documents = rendered("production")
    assert [each["port"] for each in find(documents, "ServiceMonitor")["spec"]["endpoints"]] == ["serve"]
    with_ray = production(serviceMonitor={"rayMetrics": "ray_node_.*"})
    endpoints = find(with_ray, "ServiceMonitor", "atelier")["spec"]["endpoints"]
    by_port = {endpoint["port"]: endpoint for endpoint in endpoints}
    assert by_port["serve"]["authorization"]["type"] == "Bearer"
    environments = [env for document in documents for env in _named(document, "ATELIER_OPERATOR_TOKEN")]
    (reference,) = [env["valueFrom"]["secretKeyRef"] for env in environments]
    assert by_port["serve"]["authorization"]["credentials"].items() <= reference.items()
    assert "authorization" not in by_port["metrics"], "Ray's own"
    (kept,) = by_port["metrics"]["metricRelabelings"]
    assert (kept["regex"], kept["action"]) == ("ray_node_.*", "keep")
    assert find(documents, "Service", "atelier-metrics")["spec"]["publishNotReadyAddresses"], "those tell why"
    (dropped,) = by_port["serve"]["relabelings"]
    assert (dropped["regex"], dropped["action"]) == ("head", "drop"), "it names the port and serves nothing"


def _named(node: Any, name: str) -> list[dict[str, Any]]:
    """Every object called `name` anywhere below."""
    if isinstance(node, dict):
        found = [cast(dict[str, Any], node)] if cast(Any, node).get("name") == name else []
        return found + [each for value in cast(dict[str, Any], node).values() for each in _named(value, name)]
    return [each for value in node for each in _named(value, name)] if isinstance(node, list) else []


def test_a_generated_secret_has_every_key_and_no_default() -> None:
    first, second = (find(render(profile_values("cpu-demo")), "Secret", "atelier-secrets")["data"] for _ in range(2))
    passwords = {"redis-password", "redis-scaler-password", "redis-operator-password", "gcs-redis-password"}
    assert set(first) == passwords | {"pepper", "signing-keys", "operator-token"}
    assert all(first[key] != second[key] for key in first)


def test_an_upgrade_keeps_a_generated_secret(tmp_path: Path) -> None:
    old = {"pepper": "b2xk", "signing-keys": "e30="}
    folder = chart_beside_secret(tmp_path, **old)
    kept = find(render(profile_values("cpu-demo"), folder=folder), "Secret", "atelier-secrets")["data"]
    assert kept.items() >= old.items()
    assert len(kept["operator-token"]) > 20, "a key of a later version is added"
