"""The catalog file: its rows, and what is said of those that are set aside."""

import json
import re
from collections.abc import Callable
from datetime import UTC, date
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.domain.catalog import Adapter, bases_of_loras
from serve_app.loras.catalog_file import CatalogError, read_catalog
from tests.support import write_safetensors

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


def _only_adapter(path: Path) -> Adapter:
    (adapter,) = read_catalog(path).adapters.values()
    return adapter


def test_relative_paths_are_read_from_the_files_folder(tmp_path: Path) -> None:
    catalog = read_catalog(_file(tmp_path))
    assert catalog.adapters["model_one"].file == str(tmp_path / "loras" / "one.safetensors")
    assert catalog.base_models["pocket"].source == str((tmp_path / "../models/pocket").resolve())
    assert not catalog.set_aside


@pytest.mark.parametrize(("config", "read"), [({}, "models/painting"), ({"config": "sdxl"}, "sdxl")])
def test_a_base_model_may_be_one_file_with_a_config(tmp_path: Path, config: Row, read: str) -> None:
    row = {"id": "painting", "file": "models/painting.safetensors", **config}
    models = read_catalog(_file(tmp_path, lambda content: content["base_models"].append(row))).base_models
    assert models["painting"].source == str(tmp_path / "models" / "painting.safetensors")
    assert models["painting"].config == str(tmp_path / read)
    assert not models["pocket"].config


def test_a_base_model_may_name_its_vae_sampler_clip_skip_and_precision(tmp_path: Path) -> None:
    row = {"id": "more", "folder": "models/more", "vae": "models/vae.safetensors", "sampler": "heun", "clip_skip": 1}
    row["precision"] = "fp8"
    model = read_catalog(_file(tmp_path, lambda content: content["base_models"].append(row))).base_models["more"]
    assert model.vae == str(tmp_path / "models" / "vae.safetensors")
    assert (model.sampler, model.passes, model.clip_skip, model.precision) == ("heun", 2, 1, "fp8")


SD, XL = "StableDiffusionPipeline", "StableDiffusionXLPipeline"
UNET = {"cross_attention_dim": 768, "block_out_channels": [320, 640], "sample_size": 64, "time_cond_proj_dim": None}
ENCODER = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 49408, "projection_dim": 768}


@pytest.mark.parametrize(
    ("pipeline", "unet", "encoder", "why"),
    [
        (SD, {"transformer_layers_per_block": 1, "sample_size": 96}, {"vocab_size": 49410}, ""),
        ("LatentConsistencyModelPipeline", {"time_cond_proj_dim": 256}, {"projection_dim": 512}, ""),
        (SD, {}, {"text_config": ENCODER, "hidden_size": 1280}, ""),
        (SD, {"cross_attention_dim": 1024}, {}, "unet.cross_attention_dim is 768 in one, and 1024 in other"),
        (SD, {"block_out_channels": [320]}, {}, "unet.block_out_channels is [320, 640] in one, and [320] in other"),
        (SD, {}, {"num_hidden_layers": 23}, "text_encoder.num_hidden_layers is 12 in one, and 23 in other"),
        (XL, {}, {}, "one is of the family sd, and other of sdxl"),
        ("KolorsPipeline", {}, {}, "the family and widths of other cannot be read here"),
        ("", {}, {}, "the family and widths of other cannot be read here"),
    ],
)
def test_loras_of_a_base_model_are_for_all_of_its_family_and_widths(
    tmp_path: Path, pipeline: str, unet: Row, encoder: Row, why: str
) -> None:
    """What gives no layer its size, and what only one configuration says, is no difference."""

    def describe(content: Row) -> None:
        for name, of, *parts in (("one", SD, UNET, ENCODER), ("other", pipeline, UNET | unet, ENCODER | encoder)):
            files = dict(zip(("unet/config.json", "text_encoder/config.json"), parts, strict=True))
            for file, config in (files | {"model_index.json": {"_class_name": of}} if of else {}).items():
                (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / file).write_text(json.dumps(config))
            content["base_models"].append({"id": name, "folder": name})

    models = [*read_catalog(_file(tmp_path, describe)).base_models.values()]
    assert models[2].why_not_for(models[1]) == why
    assert bases_of_loras(models) == {
        "pocket": ["pocket"],
        "one": ["one"] if why else ["one", "other"],
        "other": ["other"] if why else ["other", "one"],
    }


def test_base_models_and_adapters_may_say_what_they_are_drawn_with(tmp_path: Path) -> None:
    def change(content: Row) -> None:
        content["base_models"].append(
            {"id": "turbo", "folder": "turbo", "steps": 8, "guidance": 1, "guidance_end": 0.5}
        )
        wanted = {"sampler": "lcm-trailing", "steps": 4, "guidance": 1.5, "guidance_start": 0, "guidance_end": 0.25}
        content["adapters"].append({**content["adapters"][0], "id": "model_quick", **wanted})

    catalog = read_catalog(_file(tmp_path, change))
    turbo = catalog.base_models["turbo"]
    assert (turbo.steps, turbo.guidance, turbo.guidance_start, turbo.guidance_end) == (8, 1, None, 0.5)
    quick, usual = catalog.adapters["model_quick"], catalog.adapters["model_one"]
    assert (quick.sampler, quick.steps, quick.guidance) == ("lcm-trailing", 4, 1.5)
    assert (quick.guidance_start, quick.guidance_end) == (0, 0.25)
    assert (usual.sampler, usual.steps, usual.guidance) == ("", None, None)
    assert not catalog.set_aside


@pytest.mark.parametrize(("index", "said", "steps", "guidance"), [
    ({"_class_name": "Krea2Pipeline"}, {}, 28, 5.5),
    ({"_class_name": "Krea2Pipeline", "is_distilled": True}, {}, 8, 1.0),
    ({"_class_name": "Krea2Pipeline", "is_distilled": True}, {"steps": 12}, 12, 1.0),
    ({"_class_name": "Flux2KleinPipeline", "is_distilled": True}, {}, 4, 1.0),
    ({"_class_name": "FluxPipeline", "guidance_embeds": True}, {}, 28, 3.5),
    ({"_class_name": "FluxPipeline", "guidance_embeds": False}, {}, 4, 1.0),
    ({"_class_name": "FluxPipeline", "guidance_embeds": False}, {"guidance": 2}, 4, 2.0),
    ({"_class_name": "ZImagePipeline"}, {}, None, None),
    ([], {}, None, None),
])  # fmt: skip
def test_a_base_model_is_drawn_as_its_family_and_its_folder_say_unless_its_row_does(
    tmp_path: Path, index: object, said: Row, steps: int | None, guidance: float | None
) -> None:
    """The index and the transformer's configuration say the same here."""
    (tmp_path / "m" / "transformer").mkdir(parents=True)
    for name in ("model_index.json", "transformer/config.json"):
        (tmp_path / "m" / name).write_text(json.dumps(index))
    row = {"id": "m", "folder": "m", **said}
    model = read_catalog(_file(tmp_path, lambda content: content["base_models"].append(row))).base_models["m"]
    assert (model.steps, model.guidance) == (steps, guidance)


def test_a_base_model_may_name_folders_of_its_text_encoder_and_tokenizer(tmp_path: Path) -> None:
    row = {"id": "turbo", "file": "turbo.safetensors", "text_encoder": "models/qwen", "tokenizer": "models/words"}
    models = read_catalog(_file(tmp_path, lambda content: content["base_models"].append(row))).base_models
    assert models["turbo"].text_encoder == str(tmp_path / "models" / "qwen")
    assert models["turbo"].tokenizer == str(tmp_path / "models" / "words")
    assert not models["pocket"].text_encoder
    assert not models["pocket"].tokenizer


def _set(field: str, value: object) -> Callable[[Row], None]:
    return lambda content: content["adapters"][0].update({field: value})


def _base_model(**row: object) -> Callable[[Row], None]:
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
        (_set("folder", "loras/peft"), "must have either a file or a folder"),
        (_set("sha256", "short"), "sha256 must be 64"),
        (_set("base_model", "nothing"), "base_model 'nothing' is not in base_models"),
        (_set("accounts", "acme"), "accounts must be a list of account names or ids"),
        (_set("accounts", [["acme"]]), "accounts must be a list of account names or ids"),
        (_set("created_at", 2026), "created_at must be an ISO 8601 time"),
        (_set("description", 7), "description must be text"),
        (_set("color", "red"), "unknown field 'color'"),
        (lambda content: content["adapters"].append(dict(content["adapters"][0])), "row 2 .*used twice"),
        (
            lambda content: content["base_models"].append({"id": "pocket", "folder": "x"}),
            "base_models, row 2 .*used twice",
        ),
        (_base_model(), r"row 2 \(more\): must have either a folder or a file"),
        (_base_model(folder="x", file="y.safetensors"), "must have either a folder or a file"),
        (_base_model(folder="x", config="y"), "config belongs to a file"),
        (_base_model(folder="x", sampler="eular"), r"sampler must be one of euler, euler-a, .* not 'eular'"),
        (_base_model(folder="x", clip_skip=-1), "clip_skip must not be negative"),
        (_base_model(folder="x", clip_skip="2"), "clip_skip must be a whole number"),
        (_base_model(folder="x", precision="int4"), "precision must be fp8, or is left out"),
        (_base_model(folder="x", group="SDXL"), "group must be 1 to 32 of a-z 0-9 -, not beginning with -"),
        (_base_model(folder="x", steps=0), "steps must be 1 to 50"),
        (_base_model(folder="x", guidance=0), "guidance must be 1 to 20"),
        (_base_model(folder="x", guidance_end=1.5), "guidance_end must be 0 to 1"),
        (_set("guidance_start", 1), "guidance_start must be below guidance_end, both from 0 to 1, not 1 and 1"),
        (_set("steps", 8.5), "steps must be a whole number"),
        (_set("guidance", "low"), "guidance must be a number"),
        (_set("sampler", "lmc"), "sampler must be one of .* not 'lmc'"),
        (_base_model(file="x.ckpt"), r"file must be a .safetensors file"),
        (lambda content: content["adapters"].append("text"), "adapters, row 2: must be a mapping"),
    ],
)
def test_a_row_with_a_mistake_is_set_aside_by_name_and_the_rest_is_read(
    tmp_path: Path, change: Callable[[Row], None], complaint: str
) -> None:
    def with_another(content: Row) -> None:
        another = {**content["adapters"][0], "id": "model_two"}
        change(content)
        content["adapters"].append(another)

    catalog = read_catalog(_file(tmp_path, with_another))
    assert "model_two" in catalog.adapters
    assert "pocket" in catalog.base_models
    (row,) = catalog.set_aside
    assert re.search(complaint, row.reason)
    assert "\n" not in row.reason
    assert "catalog.yaml" in row.reason


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{a: [", r"not YAML: .*, line \d"),
        ("[]", "must be a mapping"),
        ("adapters: {a: 1}", "adapters must be a list"),
        ("loras: []", "unknown field 'loras'"),
        ("base_models: [{id: pocket}]", r"row 1 \(pocket\): must have either a folder or a file"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole_is_an_error(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(CatalogError, match=complaint) as caught:
        read_catalog(path)
    assert "broken.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"nothing\.yaml: No such file"):
        read_catalog(tmp_path / "nothing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CatalogError, match="not YAML"):
        read_catalog(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(
    "value", ["2026-11-21", "2026-11-21 12:00:00", "2026-11-21T14:00:00+02:00", date(2026, 11, 21)]
)
def test_a_time_without_a_zone_is_utc(tmp_path: Path, value: object) -> None:
    adapter = _only_adapter(_file(tmp_path, _set("created_at", value)))
    assert adapter.created_at.astimezone(UTC).date() == date(2026, 11, 21)
    assert adapter.created_at.hour in (0, 12)


def test_an_empty_section_holds_nothing(tmp_path: Path) -> None:
    assert not read_catalog(_file(tmp_path, lambda content: content.update(adapters=None))).adapters


def test_an_account_may_be_named_by_a_number(tmp_path: Path) -> None:
    assert _only_adapter(_file(tmp_path, _set("accounts", [42, "acme"]))).accounts == {"42", "acme"}
