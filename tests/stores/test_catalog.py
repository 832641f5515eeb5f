"""The catalog: a file read once, with one clear error; grants over it."""

from collections.abc import Callable
from datetime import UTC, date
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from serve_app.service.resources import Resources, open_resources
from serve_app.settings import Settings
from serve_app.stores.catalog_file import CatalogError
from tests.support import POCKET_ADAPTERS, PRIVATE_ADAPTER, adapter_id, write_safetensors

Row = dict[str, Any]


def _file(folder: Path, change: Callable[[Row], None] = lambda _: None) -> Path:
    write_safetensors(folder / "loras" / "one.safetensors")
    content: Row = {
        "base_models": [{"id": "pocket", "folder": "../models/pocket"}],
        "adapters": [
            {
                "id": "model_one",
                "name": "One",
                "description": "The first.",
                "created_at": "2026-11-21T12:00:00Z",
                "file": "loras/one.safetensors",
                "base_model": "pocket",
            }
        ],
    }
    change(content)
    path = folder / "catalog.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


async def test_everyone_sees_the_public_adapters_and_the_owner_its_own(resources: Resources) -> None:
    owner = await resources.accounts.create("owner")
    other = await resources.accounts.create("other")
    assert [adapter.id for adapter in await resources.catalog.adapters(other.id)] == [
        adapter_id(name) for name in POCKET_ADAPTERS
    ]
    assert PRIVATE_ADAPTER in {adapter.id for adapter in await resources.catalog.adapters(owner.id)}
    assert resources.catalog.adapter("model_unknown") is None
    assert len(resources.catalog.all()) == 9
    assert [base.id for base in resources.catalog.base_models()] == ["pocket"]


async def test_a_grant_and_a_revocation_hold_over_the_file(resources: Resources, settings: Settings) -> None:
    other = await resources.accounts.create("other")
    assert await resources.catalog.grant(PRIVATE_ADAPTER, other.id)
    assert await resources.catalog.revoke(adapter_id("neon"), other.id)
    async with open_resources(settings) as second:  # another process
        usable = {adapter.id for adapter in await second.catalog.adapters(other.id)}
        assert PRIVATE_ADAPTER in usable
        assert adapter_id("neon") not in usable
    assert not await resources.catalog.grant("model_unknown", other.id)


def test_relative_paths_are_read_from_the_files_folder(
    tmp_path: Path, settings: Settings, redis_db: redis.Redis
) -> None:
    store = _load(settings, _file(tmp_path))
    (adapter,) = store.all()
    assert adapter.file == str(tmp_path / "loras" / "one.safetensors")
    assert len(adapter.sha256) == 64
    assert store.base_models()[0].source == str((tmp_path / "../models/pocket").resolve())


@pytest.mark.parametrize(("config", "read"), [({}, "models/painting"), ({"config": "sdxl"}, "sdxl")])
def test_a_base_model_may_be_one_file_with_a_config(tmp_path: Path, settings: Settings, config: Row, read: str) -> None:
    row = {"id": "painting", "file": "models/painting.safetensors", **config}
    store = _load(settings, _file(tmp_path, lambda content: content["base_models"].append(row)))
    painting = store.base_models()[1]
    assert painting.source == str(tmp_path / "models" / "painting.safetensors")
    assert painting.config == str(tmp_path / read)
    assert not store.base_models()[0].config


def test_a_reload_takes_the_new_file_or_keeps_the_old(tmp_path: Path, settings: Settings) -> None:
    path = _file(tmp_path)
    store = _load(settings, path)
    _file(tmp_path, lambda content: content["adapters"][0].update(name="Renamed"))
    store.reload()
    assert store.all()[0].name == "Renamed"
    path.write_text("adapters: 3")
    with pytest.raises(CatalogError):
        store.reload()
    assert store.all()[0].name == "Renamed"


def _set(field: str, value: object) -> Callable[[Row], None]:
    return lambda content: content["adapters"][0].update({field: value})


def _base_model(**row: str) -> Callable[[Row], None]:
    return lambda content: content["base_models"].append({"id": "more", **row})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("id", "has space"), "adapters, row 1 .*id must be 1 to 128"),
        (_set("id", None), "id must be text"),
        (_set("name", ""), "name must be text"),
        (lambda content: content["adapters"][0].pop("name"), r"row 1 \(model_one\): name is missing"),
        (lambda content: content["adapters"][0].pop("id"), r"row 1 \(no id\): id is missing"),
        (_set("created_at", "yesterday"), r"row 1 \(model_one\): created_at must be an ISO 8601 time"),
        (_set("file", "loras/missing.safetensors"), "missing.safetensors cannot be read"),
        (_set("sha256", "short"), "sha256 must be 64"),
        (_set("base_model", "nothing"), "base_model 'nothing' is not in base_models"),
        (_set("accounts", "acme"), "accounts must be a list of account names or ids"),
        (_set("accounts", [["acme"]]), "accounts must be a list of account names or ids"),
        (_set("created_at", 2026), "created_at must be an ISO 8601 time"),
        (_set("description", 7), "description must be text"),
        (_set("colour", "red"), "unknown field 'colour'"),
        (lambda content: content["adapters"].append(dict(content["adapters"][0])), "row 2 .*used twice"),
        (
            lambda content: content["base_models"].append({"id": "pocket", "folder": "x"}),
            "base_models, row 2 .*used twice",
        ),
        (_base_model(), r"row 2 \(more\): must have either a folder or a file"),
        (_base_model(folder="x", file="y.safetensors"), "must have either a folder or a file"),
        (_base_model(folder="x", config="y"), "config belongs to a file"),
        (_base_model(file="x.ckpt"), r"file must be a .safetensors file"),
        (lambda content: content["adapters"].append("text"), "adapters, row 2: must be a mapping"),
        (lambda content: content.update(adapters={"a": 1}), "adapters: must be a list"),
        (lambda content: content.update(loras=[]), "unknown section 'loras'"),
    ],
)
def test_a_mistake_is_named_with_its_row(
    tmp_path: Path, settings: Settings, change: Callable[[Row], None], complaint: str
) -> None:
    with pytest.raises(CatalogError, match=complaint) as caught:
        _load(settings, _file(tmp_path, change))
    assert "\n" not in str(caught.value)
    assert "catalog.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "value", ["2026-11-21", "2026-11-21 12:00:00", "2026-11-21T14:00:00+02:00", date(2026, 11, 21)]
)
def test_a_time_without_a_zone_is_utc(tmp_path: Path, settings: Settings, value: object) -> None:
    (adapter,) = _load(settings, _file(tmp_path, _set("created_at", value))).all()
    assert adapter.created_at.astimezone(UTC).date() == date(2026, 11, 21)
    assert adapter.created_at.hour in (0, 12)


def test_an_empty_section_holds_nothing(tmp_path: Path, settings: Settings) -> None:
    assert _load(settings, _file(tmp_path, lambda content: content.update(adapters=None))).all() == []


def test_an_account_may_be_named_by_a_number(tmp_path: Path, settings: Settings) -> None:
    (adapter,) = _load(settings, _file(tmp_path, _set("accounts", [42, "acme"]))).all()
    assert adapter.accounts == {"42", "acme"}


def test_a_missing_or_broken_file_is_named(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(CatalogError, match=r"nothing\.yaml: No such file"):
        _load(settings, tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("{a: [")
    with pytest.raises(CatalogError, match="not YAML"):
        _load(settings, broken)
    broken.write_text("[]")
    with pytest.raises(CatalogError, match="must hold"):
        _load(settings, broken)


def _load(settings: Settings, catalog: Path) -> Any:
    from serve_app.stores.catalog import CatalogStore
    from serve_app.stores.redis import connect

    return CatalogStore(connect("unix:///unused"), settings.model_copy(update={"catalog": catalog}))
