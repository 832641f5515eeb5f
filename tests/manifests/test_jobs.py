"""The chart's jobs fetch models once and whole, and write an account's key into its Secret once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import s3fs

from tests.manifests.chart import CHART, find, merge, profile_values, render
from tests.manifests.pods import pods
from tests.manifests.rules import broken_rules
from tests.support import ROOT, Answering, serving

FETCH = CHART / "files" / "fetch_models.py"
CREATE_ACCOUNT = CHART / "files" / "create_account.py"


def run(script: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Models:
    """A list of one model, a place it comes from and the volume it goes to."""

    def __init__(self, folder: Path) -> None:
        self.source, self.volume, self.file = folder / "source", folder / "volume", folder / "models.json"
        (self.source / "unet").mkdir(parents=True)
        self.volume.mkdir()
        self.write("one")

    def write(self, weights: str, url: str | None = None) -> None:
        (self.source / "unet" / "weights.safetensors").write_text(weights)
        self.file.write_text(json.dumps([{"name": "sdxl", "url": url or self.source.as_uri()}]))

    @property
    def weights(self) -> str:
        return (self.volume / "sdxl" / "unet" / "weights.safetensors").read_text()

    def fetch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run(FETCH, *words, self.file, self.volume)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def test_a_model_is_fetched_once(models: Models) -> None:
    assert models.fetch().returncode == 0
    assert models.weights == "one"
    models.write("two")
    assert models.fetch().stdout == ""
    assert models.weights == "one"


def test_another_source_replaces_a_model_whole_once_its_fetch_succeeds(models: Models) -> None:
    models.fetch()
    models.write("two", url=(models.source / "nowhere").as_uri())
    assert models.fetch().returncode != 0
    assert models.weights == "one"
    models.source = models.source.rename(models.source.with_name("other"))
    models.write("two")
    assert models.fetch().returncode == 0
    assert models.weights == "two"
    assert [path.name for path in models.volume.iterdir()] == ["sdxl"]


def test_pods_wait_until_the_models_of_the_list_are_there(models: Models) -> None:
    waiting = subprocess.Popen(
        [sys.executable, str(FETCH), "--wait", str(models.file), str(models.volume)], stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout
    with waiting:
        assert waiting.stdout.readline() == "waiting for sdxl\n"
        models.fetch()
        assert waiting.wait(timeout=30) == 0


REVISION = "462165984030d82259a11f4367a4eed129e94a7b"


MIRROR = "http://hub.example"


class ModelHub(Answering):
    """A proxy that knows the mirror alone: one model in the hub's protocol: its tree, and its files by revision."""

    files: ClassVar = {"model_index.json": b"{}", "unet/weights.safetensors": b"one", "training.ckpt": b"not asked for"}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix(MIRROR)  # as a proxy is asked
        name = path.removeprefix(f"/a/sdxl/resolve/{REVISION}/")
        if path == f"/api/models/a/sdxl/tree/{REVISION}":
            sizes = {file: len(text) + file.endswith(".ckpt") for file, text in self.files.items()}
            rows = [{"type": "file", "path": file, "size": size} for file, size in sizes.items()]
            tree = json.dumps([{**row, "oid": "0" * 40} for row in rows])
            self.answer(200, tree.encode(), Content_Type="application/json")
        elif name in self.files:
            self.answer(200, self.files[name], ETag='"1"', X_Repo_Commit=REVISION)
        else:
            self.answer(404)

    do_HEAD = do_GET


def test_a_model_comes_from_a_hubs_mirror_by_a_proxy_and_by_its_revision(models: Models, tmp_path: Path) -> None:
    entry = {"name": "sdxl", "repository": "a/sdxl", "revision": REVISION, "include": ["*.json", "*.safetensors"]}
    models.file.write_text(json.dumps([entry]))
    with serving(ModelHub) as address:
        environment = {
            "HF_ENDPOINT": MIRROR,
            "HTTP_PROXY": address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hub"),
        }
        done = run(FETCH, models.file, models.volume, **environment)
        assert done.returncode == 0, done.stderr
        assert models.weights == "one"
        assert not (models.volume / "sdxl" / "training.ckpt").exists()
        assert "fetching sdxl: 2 files" in done.stdout
        models.file.write_text(json.dumps([{**entry, "include": ["*.ckpt"]}]))
        done = run(FETCH, models.file, models.volume, **environment)
    assert "sdxl was not fetched: OSError: training.ckpt has 13 of 14 bytes" in done.stderr
    assert models.weights == "one", "what is not whole takes no place"


def test_a_model_comes_from_a_store_with_an_endpoint_and_a_key_of_its_own(models: Models, s3: dict[str, Any]) -> None:
    """Without options of its own by those of the storage, where that is of the same kind."""
    s3fs.S3FileSystem(**s3).pipe_file("pictures/sdxl/unet/weights.safetensors", b"from a bucket")
    options = {"client_kwargs": s3["client_kwargs"]}
    entry = {"name": "sdxl", "url": "s3://pictures/sdxl"}
    of_storage = {"ATELIER_STORAGE_URL": "s3://pictures", "ATELIER_STORAGE_OPTIONS": json.dumps(options)}
    for entries, environment in (([{**entry, "options": options}], {}), ([entry], of_storage)):
        models.file.write_text(json.dumps(entries))
        keys = {"MODEL_0_KEY": "test", "MODEL_0_SECRET": "test"}
        done = run(FETCH, models.file, models.volume, **environment, **keys)
        assert done.returncode == 0, done.stderr
        assert models.weights == "from a bucket"


def test_the_models_job_has_options_and_the_keys_of_each_store() -> None:
    downloads = [{"name": "a", "url": "s3://a"}, {"name": "b", "url": "s3://b", "credentialsSecret": "more"}]
    documents = render(merge(profile_values("production"), {"models": {"downloads": downloads}}))
    assert broken_rules(documents) == []
    (pod,) = [each for each in pods(documents) if each.component == "models-job"]
    (container,) = pod.containers
    assert {"name": "ATELIER_STORAGE_URL", "value": "s3://atelier-images"} in container["env"]
    keys = [each for each in container["env"] if each["name"].startswith("MODEL_")]
    assert {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in keys} == {
        "MODEL_1_KEY": "more",
        "MODEL_1_SECRET": "more",
    }
    assert "more" not in find(documents, "ConfigMap", "atelier-fetch-models")["data"]["models.json"]


class KubernetesApi:
    """One namespace's Secrets over HTTP, as the account job reads and patches them."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {"first": {"metadata": {"name": "first"}}}
        self.seen: list[tuple[str, str, str]] = []
        api = self

        class Handler(Answering):
            def do_GET(self) -> None:
                content_type, token = self.headers.get("Content-Type", ""), self.headers["Authorization"]
                api.seen.append((self.command, content_type, token))
                name = self.path.removeprefix("/api/v1/namespaces/demo/secrets/")
                secret = api.secrets[name]
                if self.command == "PATCH":
                    change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    secret.setdefault("data", {}).update(change["stringData"])
                self.answer(200, json.dumps(secret).encode(), Content_Type="application/json")

            do_PATCH = do_GET

        self.handler = Handler


@pytest.mark.slow
def test_the_key_of_the_first_account_goes_into_its_secret_once(tmp_path: Path, redis_url: str) -> None:
    kubernetes = KubernetesApi()
    identity = tmp_path / "identity"
    identity.mkdir()
    (identity / "namespace").write_text("demo")
    (identity / "token").write_text("proof")
    words = ("--secret", "first", "--plan-a", "professional", "--plan-b", "premium", "acme")
    with serving(kubernetes.handler) as address:
        environment = {
            "ATELIER_KUBERNETES_API": address,
            "ATELIER_KUBERNETES_IDENTITY": str(identity),
            "ATELIER_REDIS_URL": redis_url,
            "ATELIER_DATA_DIR": str(tmp_path / "data"),
            "ATELIER_PEPPER": "a pepper of the pod",
        }
        done = run(CREATE_ACCOUNT, *words, **environment)
        assert done.returncode == 0, done.stderr
        kept = dict(kubernetes.secrets["first"]["data"])
        again = run(CREATE_ACCOUNT, *words, **environment)
    assert kept["account"] == "acme"
    assert len(kept["key"]) > 20
    assert kept["key"] not in done.stdout
    assert ("PATCH", "application/merge-patch+json", "Bearer proof") in kubernetes.seen
    assert again.stdout == "first holds a key already\n"
    assert kubernetes.secrets["first"]["data"] == kept
