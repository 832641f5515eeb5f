"""A LoRA is drawn on other base models of its family and widths: over the real port, by the workers of their groups."""

import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from serve_app.client import Client, InvalidRequest
from serve_app.domain.requests import Variant
from serve_app.engine import Engine, EngineOptions
from serve_app.settings import Settings
from serve_app.worker.generation import GenerationExecutor
from serve_app.worker.worker import Worker
from tests.served import Served, served
from tests.support import POCKET, adapter_id, add_base_model, pocket_of_widths, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("generation")]
OUTLINE, NEON = adapter_id("outline"), adapter_id("neon")
OUTLINE_FILE = POCKET / "loras" / "outline.safetensors"
ASKED: dict[str, Any] = {"width": 256, "height": 256, "steps": 3, "seed": 7}
DRAWN: dict[str, Any] = {"width": 256, "height": 256, "steps": 3, "seeds": [7], "adapter": OUTLINE_FILE, "weight": 0.75}


@dataclass(slots=True)
class Groups(Served):
    """A service with a worker for each of these groups of base models."""

    engines: dict[str, Engine] = field(default_factory=dict[str, Engine])
    _workers: list[Worker] = field(default_factory=list[Worker])

    async def hint(self, kind: str, job_id: str) -> None:
        for worker in self._workers:
            worker.hint()

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        parts = self.resources
        for group, engine in self.engines.items():
            executor = GenerationExecutor(engine, parts.catalog, parts.weights, parts.images, group=group)
            self._workers.append(Worker(parts.for_workers, executor, name=group))
            self._workers[-1].start()
        yield
        for worker in self._workers:
            await worker.drain(timedelta(seconds=2))


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of the pocket's structure with other weights."""
    folder = shutil.copytree(POCKET, tmp_path_factory.mktemp("models") / "turbo")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: 0.97 * tensor for name, tensor in load_file(weights).items()}, weights)
    return folder


@pytest.fixture(scope="module")
def engines(turbo: Path) -> Iterator[dict[str, Engine]]:
    options = EngineOptions(max_rows=4, exact=False)
    with Engine.load({"pocket": POCKET}, options) as own, Engine.load({"turbo": turbo}, options) as other:
        yield {"default": own, "turbo": other}


@pytest.fixture
def service(settings: Settings, engines: dict[str, Engine], turbo: Path, tmp_path: Path) -> Iterator[Groups]:
    add_base_model(settings.catalog, "turbo", turbo, group="turbo")
    narrow = pocket_of_widths(tmp_path / "narrow", cross_attention_dim=96)
    add_base_model(settings.catalog, "narrow", narrow, group="turbo")
    with served(Groups(engines=engines), settings) as running:
        yield running


def test_a_lora_is_drawn_on_each_base_model_of_its_widths_and_by_default_on_its_own(
    service: Groups, engines: dict[str, Engine]
) -> None:
    account = service.run(service.resources.accounts.create("acme"))
    _, key = service.run(service.resources.api_keys.create(account.id, interfaces=frozenset(Variant)))
    client = Client(service.base_url, key)
    assert client.loras.get(OUTLINE).base_models == ("pocket", "turbo")
    on_own, on_turbo = (
        np.asarray(engines[group].generate("a red circle", **DRAWN)[0]) for group in ("default", "turbo")
    )
    assert abs(on_own.astype(int) - on_turbo).mean() > 1
    for base_model, wanted in ((None, on_own), ("pocket", on_own), ("turbo", on_turbo)):
        job = client.generate("a red circle", loras={OUTLINE: 0.75}, base_model=base_model, **ASKED)
        assert job.request["base_model"] == (base_model or "pocket")
        assert np.array_equal(pixels(job.images[0].download()), wanted), base_model
    with pytest.raises(InvalidRequest) as refused:
        client.generate("a red circle", loras=OUTLINE, base_model="narrow", **ASKED)
    assert refused.value.message == (
        "loras[0].id: a LoRA of pocket cannot be drawn on narrow: "
        "unet.cross_attention_dim is 128 in pocket, and 96 in narrow"
    )
    two = client.generate("a red circle", loras={OUTLINE: 0.75, NEON: 0.5}, base_model="turbo", **ASKED)
    assert not np.array_equal(pixels(two.images[0].download()), on_turbo)

    own = {"prompt": "a red circle", "lora_id": OUTLINE, "seed": 7, "steps": 20}
    headers = {"Authorization": f"Bearer {key}"}
    job_id = httpx.post(f"{service.base_url}/v1/generate", json=own, headers=headers).json()["request_id"]
    address = f"{service.base_url}/v1/generate/{job_id}"
    until(lambda: httpx.get(address, headers=headers).json()["status"] == "completed")
    (made,) = httpx.get(address, headers=headers).json()["images"]
    asked: dict[str, Any] = DRAWN | {"width": 512, "height": 512, "steps": 20}
    (wanted,) = engines["default"].generate("a red circle", **asked)
    assert np.array_equal(pixels(httpx.get(made["url"]).content), np.asarray(wanted)), "interface A draws on its own"


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(file)).convert("RGB"))
