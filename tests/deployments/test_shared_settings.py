"""A cluster whose machines would each have their own Redis, secrets or images is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from deployments.config import ConfigError, ServeConfig, demands, read_config
from deployments.pools import Pool
from deployments.requirements import machines, require_shared
from deployments.start_checks import check_this_machine, missing_on, unserved_groups
from serve_app.settings import Settings
from tests.support import ROOT, existing, put_in_group, write_catalog

SHARED: dict[str, Any] = {
    "redis_url": "rediss://redis.internal:6379/0",
    "storage_url": "s3://images/atelier",
    "pepper": SecretStr("p" * 32),
    "signing_keys": {"k1": SecretStr("s" * 32)},
}
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "an embedded Redis": ({"redis_url": ""}, "ATELIER_REDIS_URL is not set"),
    "a socket": ({"redis_url": "unix:///run/redis.sock"}, "ATELIER_REDIS_URL is an address of one machine"),
    "loopback": ({"redis_url": "redis://localhost:6379"}, "ATELIER_REDIS_URL is an address of one machine"),
    "its own images": ({"storage_url": ""}, "ATELIER_STORAGE_URL is not set"),
    "a folder": ({"storage_url": "file:///srv/images"}, "ATELIER_STORAGE_URL is a folder of one machine"),
    "its own pepper": ({"pepper": None}, "ATELIER_PEPPER is not set"),
    "its own signing keys": ({"signing_keys": {}}, "ATELIER_SIGNING_KEYS is not set"),
}
CONFIGS = ROOT / "configs"


def machine(gpus: int) -> list[Pool]:
    return [Pool(name="this machine", nodes=1, gpus=gpus)]


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(data_dir=tmp_path, **(SHARED | changes))


@pytest.mark.parametrize("case", OWN)
def test_what_each_machine_would_have_for_itself_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, reason = OWN[case]
    own = settings(tmp_path, **changes)
    with pytest.raises(RuntimeError, match=reason):
        require_shared(own, spread=True)
    require_shared(own, spread=False)


def test_what_all_machines_share_is_taken(tmp_path: Path) -> None:
    require_shared(settings(tmp_path), spread=True)
    require_shared(settings(tmp_path, storage_url="file:///mnt/shared", storage_shared=True), spread=True)
    require_shared(settings(tmp_path, signing_keys={}), spread=True, secrets=("pepper",))


def test_machines_are_counted_not_nodes() -> None:
    def node(address: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": alive}

    assert machines([node("10.0.0.1"), node("10.0.0.1")]) == 1
    assert machines([node("10.0.0.1"), node("10.0.0.2", alive=False)]) == 1
    assert machines([node("10.0.0.1"), node("10.0.0.2")]) == 2


def test_up_refuses_the_file_of_a_cluster(tmp_path: Path) -> None:
    service = read_config(CONFIGS / "production.yaml")
    with pytest.raises(ConfigError, match=r"REDIS_URL.*STORAGE_URL.*PEPPER.*SIGNING_KEYS"):  # all at once
        check_this_machine(CONFIGS / "production.yaml", service, Settings(data_dir=tmp_path, redis_url=""))
    with pytest.raises(
        ConfigError, match="the resources generator, housekeeper, ingress, upscaler, z-image are a cluster's"
    ):
        check_this_machine(CONFIGS / "production.yaml", service, settings(tmp_path))


def test_groups_and_the_catalogs_base_models_are_compared(tmp_path: Path) -> None:
    """Generators without a base model could never start, and base models without generators would be waited for."""
    group = "{name: sdxl, route_prefix: null, import_path: 'deployments.app:build_group', args: {group: sdxl}}"
    file, here = tmp_path / "groups.yaml", settings(tmp_path, catalog=write_catalog(tmp_path / "catalog"))
    file.write_text(f"applications: [{{}}, {group}]")
    both = read_config(file)
    with pytest.raises(ConfigError, match="no base model for the generators of the group sdxl"):
        check_this_machine(file, both, here)
    put_in_group(here.catalog, "sdxl")
    with pytest.raises(ConfigError, match="no base model for the generators of the group default"):
        check_this_machine(file, both, here)
    file.write_text(f"applications: [{{args: {{generator: null}}}}, {group}]")
    alone = read_config(file)
    check_this_machine(file, alone, here)
    assert unserved_groups(alone, here) == ""
    assert unserved_groups(read_config(CONFIGS / "local.yaml"), here) == "pocket (sdxl)"
    assert unserved_groups(alone, here.model_copy(update={"catalog": tmp_path / "none.yaml"})) == ""


def test_a_machine_without_a_gpu_lacks_what_asks_for_one() -> None:
    args = read_config(CONFIGS / "one_gpu.yaml").args
    missing = existing(missing_on(demands(args), machine(0)))
    assert "generator 0.7, upscaler 0.3" in missing
    assert "Ray finds none on this machine" in missing
    assert missing_on(demands(args), machine(1)) is None
    assert missing_on(read_config(CONFIGS / "local.yaml").demands, machine(0)) is None


def test_more_replicas_than_a_machine_has_gpus_are_refused_at_their_largest_number() -> None:
    policy = "{policy_function: 'deployments.scaling:BacklogPolicy', policy_kwargs: {kind: generation}}"
    scaling = f"{{min_replicas: 1, max_replicas: 3, policy: {policy}}}"
    own = f"deployments: [{{name: generator, autoscaling_config: {scaling}}}]"
    text = f"applications: [{{args: {{generator: {{num_gpus: 1, replicas: auto}}}}, {own}}}]"
    asked = ServeConfig.model_validate(yaml.safe_load(text)).demands
    assert "generator 3 × 1" in existing(missing_on(asked, machine(2)))
    assert missing_on(asked, machine(3)) is None
