"""An account uploads, lists, changes, shares and deletes its own LoRAs by HTTP, within its quota."""

import asyncio
import hashlib
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml

from serve_app.api import middleware
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import Variant
from serve_app.loras import catalog
from serve_app.loras.catalog import position_of
from serve_app.loras.registration import UPLOADS_AT_ONCE
from tests.api.app import LORA, Member, TestService, client_of, error_of, open_service, refused
from tests.api.conftest import MAX_LORA_SIZE
from tests.support import (
    POCKET,
    PRIVATE_ADAPTER,
    adapter_of,
    add_base_model,
    change_base_model,
    existing,
    slowed,
    wait_until,
)

A, B = Variant.A, Variant.B
OUTLINE = POCKET / "loras" / "outline.safetensors"
SAID = {"name": "Ink", "base_model": "pocket"}
GIB = 1 << 30


async def post(
    service: TestService,
    headers: dict[str, str],
    fields: dict[str, Any] | None = None,
    *,
    file: bytes | None = b"no file",
    **more: bytes,
) -> httpx.Response:
    """A form; its files need names to be files for httpx."""
    files = {name: content for name, content in {"file": file, **more}.items() if content is not None}
    return await service.client.post("/v1/loras", headers=headers, data=SAID if fields is None else fields, files=files)


async def registered(service: TestService, owner: Member, **fields: Any) -> str:
    """The id of a LoRA that the account owns; its file is not looked at."""
    record = adapter_of(owner.account.id, **{"size_bytes": 1000, **fields})
    await service.resources.adapter_registry.register(record)
    return record.id


def uploads(service: TestService) -> list[Path]:
    folder = service.resources.settings.data_dir / "uploads"
    return list(folder.iterdir()) if folder.exists() else []


@pytest.mark.slow
async def test_an_uploaded_lora_is_at_once_one_of_both_interfaces_and_uploaded_once(
    service: TestService, member: Member
) -> None:
    said = SAID | {"description": "Thin lines.", "trigger_words": "ink drawing, paper"}
    once = member.a | {"Idempotency-Key": "k1"}
    added = await post(service, once, said, file=OUTLINE.read_bytes())
    assert added.status_code == 201, added.text
    lora = added.json()
    assert added.headers["location"] == f"/v1/loras/{lora['id']}"
    assert lora["found"]["summary"] == "pocket, rank 8, attention and convolution, from diffusers"
    assert (lora["trigger_words"], lora["is_own"], lora["size_bytes"]) == (
        ["ink drawing", "paper"],
        True,
        OUTLINE.stat().st_size,
    )
    for _ in ("by this version", "by the one before"):
        again = await post(service, once, said, file=OUTLINE.read_bytes())
        assert (again.status_code, again.headers["idempotency-replayed"], again.json()) == (201, "true", lora)
        refused(await post(service, once, SAID, file=OUTLINE.read_bytes()), 409, "idempotency_conflict")
        (written,) = await service.keep_digests_of_before(member)
    before = json.dumps([said | {"trigger_words": lora["trigger_words"]}, lora["sha256"]], sort_keys=True)
    assert written["body"] == hashlib.sha256(before.encode()).hexdigest()
    same = await post(service, member.b, SAID, file=OUTLINE.read_bytes())
    assert (same.status_code, same.json()) == (200, lora)
    models = (await service.client.get("/v1/models", headers=member.b)).json()["models"]
    assert {"id": lora["id"], "name": "Ink", "description": "Thin lines.", "created_at": lora["created_at"]} in models
    await service.submit(member, lora_id=lora["id"])
    assert [row.act for row in await service.resources.audit.rows(member.account.id)] == ["lora_added"]
    assert uploads(service) == []
    assert (await service.client.get(f"/v1/loras/{lora['id']}", headers=member.b)).json() == lora


async def test_an_upload_for_a_base_model_that_no_worker_has_loaded_is_warned_of(
    service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = [slowed(monkeypatch, call) for call in ("mkdir", "rename")]
    await registered(service, member, sha256=hashlib.sha256(b"no file").hexdigest())
    await service.complete(await service.submit(member))
    for loaded, warns in (((), False), (("other",), True), (("other", "pocket"), False)):
        await service.resources.measures.show(JobKind.GENERATION, "tests", {}, base_models=loaded)
        answer = await post(service, member.a)
        assert answer.status_code == 200, answer.text
        assert ("No running worker has loaded pocket" in answer.json().get("warning", "")) == warns
    assert [set(each) for each in turned] == [{True}] * 2, "a disk that is slow holds up no other caller"


async def test_an_upload_for_a_group_that_nothing_serves_is_warned_of_and_for_an_idle_one_is_not(
    tmp_path: Path,
) -> None:
    kept: bool | None = None

    async def keeps(_pool: str) -> bool | None:
        return kept

    async with (
        open_service(tmp_path) as service,
        client_of(service.resources.with_parts(keeps_worker=keeps).app()) as client,
    ):
        member, there = await service.member(), TestService(service.resources, client)
        await registered(service, member, sha256=hashlib.sha256(b"no file").hexdigest())
        warning = (await post(there, member.a)).json()["warning"]
        assert warning == "Nothing serves pocket: jobs with this LoRA wait until generators for it are started."
        kept = False
        assert "warning" not in (await post(there, member.a)).json(), "it has scaled to zero"


@pytest.mark.slow
async def test_a_file_that_does_not_fit_is_refused_with_the_reason(service: TestService, member: Member) -> None:
    reason = "file: the file is a zip archive: unpack it, and send the safetensors file in it"
    refused(await post(service, member.a, file=b"PK\x03\x04" + b"0" * 100), 400, "invalid_parameter", reason)
    assert await service.resources.catalog.owned_ids(member.account.id) == []
    assert uploads(service) == []


@pytest.mark.slow
async def test_an_upload_is_checked_against_the_layers_of_its_own_base_model(tmp_path: Path) -> None:
    """Nothing of the base model is loaded: its layers are kept in a table, which the first upload makes."""
    import torch
    from safetensors.torch import save

    from tests.engine.tiny_z_image import write_z_image

    folder, catalog = write_z_image(tmp_path / "z_image"), tmp_path / "catalog.yaml"
    catalog.write_text(yaml.safe_dump({"base_models": [{"id": "z-image", "folder": str(folder)}], "adapters": []}))
    qkv = "diffusion_model.layers.0.attention.qkv"
    ours = {f"{qkv}.lora_A.weight": torch.ones(4, 32), f"{qkv}.lora_B.weight": torch.ones(96, 4)}
    theirs = {"lora_te2_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0)}
    async with open_service(tmp_path / "var", catalog=catalog) as service:
        member, said = await service.member(), {"name": "Ink", "base_model": "z-image"}
        wrong = await post(service, member.a, said, file=save(theirs))
        refused(wrong, 400, "invalid_parameter", "file: looks like an SDXL LoRA, this base is Z-Image: choose a base")
        added = await post(service, member.a, said, file=save(ours))
        assert added.status_code == 201, added.text
        assert added.json()["found"]["summary"] == "Z-Image, rank 4, attention"
        assert (added.json()["found"]["layers"], added.json()["found"]["components"]) == (3, ["transformer"])


class Watched:
    """A body that tells whether it was read."""

    def __init__(self, content: bytes, times: int = 1) -> None:
        self.content, self.times, self.was_read = content, times, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.times):
            self.was_read = True
            yield self.content


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE_PART = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
NAME_PART = FILE_PART.replace(b"file", b"name")


async def test_nothing_is_read_before_the_key_is_known_or_of_what_is_declared_too_large(
    service: TestService, member: Member
) -> None:
    for headers, status, code in (
        ({}, 401, "unauthorized"),
        ({"X-API-Key": "nonsense"}, 401, "unauthorized"),
        (member.a | {"Content-Length": str(MAX_LORA_SIZE + (2 << 20))}, 413, "payload_too_large"),
    ):
        body = Watched(FILE_PART)
        refused(await service.client.post("/v1/loras", headers=FORM | headers, content=body), status, code)
        assert not body.was_read


@pytest.mark.slow
async def test_an_upload_is_counted_on_the_stream_and_leaves_nothing(service: TestService, member: Member) -> None:
    body = Watched(FILE_PART + bytes(1 << 20), times=MAX_LORA_SIZE // (1 << 20) + 2)
    refused(await service.client.post("/v1/loras", headers=FORM | member.a, content=body), 413, "payload_too_large")
    assert uploads(service) == []


@pytest.mark.slow
async def test_an_upload_takes_a_few_blocks_of_memory_whatever_its_size(service: TestService, member: Member) -> None:
    async def body() -> AsyncIterator[bytes]:
        for name, value in (SAID | {"base_model": "none"}).items():
            yield f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        yield FILE_PART
        for _ in range(640):
            yield bytes(64 << 10)
        yield b"\r\n--b--\r\n"

    tracemalloc.start()
    try:
        answer = await service.client.post("/v1/loras", headers=FORM | member.a, content=body())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    refused(answer, 400, "invalid_parameter", "base_model: there is no base model")
    assert peak < 8 << 20, f"{peak / 2**20:.0f} MiB for 40 MiB"
    assert uploads(service) == []


async def test_an_account_has_few_uploads_under_way_at_once(service: TestService) -> None:
    """Many slow ones would take the disk and the places of the checks from all others."""
    member, other = await service.member(), await service.member()
    may_end = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await may_end.wait()
        yield b"--b--\r\n"

    async with asyncio.TaskGroup() as group:
        for _ in range(UPLOADS_AT_ONCE):
            group.create_task(service.client.post("/v1/loras", headers=FORM | member.a, content=slow()))
        await wait_until(lambda: len(uploads(service)) == UPLOADS_AT_ONCE)
        limited = await post(service, member.b)
        assert limited.headers["Retry-After"] == "5"
        refused(await post(service, other.a, {}), 400, "invalid_parameter", "name: is required")
        may_end.set()
    refused(limited, 429, "rate_limit_exceeded", "4 uploads in progress")
    refused(await post(service, member.b, {}), 400, "invalid_parameter", "name: is required")


async def test_an_upload_that_stops_arriving_is_given_up(
    service: TestService, regular: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "GRACE_S", 0.02)

    async def stuck() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.Event().wait()

    answer = await service.client.post("/v1/loras", headers=FORM | regular.a, content=stuck())
    refused(answer, 408, "request_timeout", "or at 32 KiB a second")
    assert uploads(service) == []


async def test_an_upload_that_cannot_be_kept_is_refused_as_a_store_that_is_away(
    service: TestService, regular: Member
) -> None:
    folder = service.resources.settings.data_dir / "uploads"
    kept = folder.with_name("kept")
    folder.mkdir(exist_ok=True)
    folder.rename(kept)
    folder.write_text("in the way")
    try:
        refused(await post(service, regular.a), 503, "unavailable")
    finally:
        folder.unlink()
        kept.rename(folder)


@pytest.mark.parametrize(
    ("fields", "file", "text"),
    [
        ({"base_model": "pocket"}, b"x", "name: is required"),
        (SAID | {"name": "a\x1bb"}, b"x", "name: must be 1 to 100 characters long, without control characters"),
        (SAID | {"nme": "x"}, b"x", "unknown field"),
        (SAID | {"name": ["x", "y"]}, b"x", "name: must be sent once"),
        (SAID, None, "file: is required"),
        (SAID | {"base_model": "none"}, b"x", "base_model: there is no base model 'none'"),
        (SAID | {"description": "x" * 20_000}, b"x", "description: must be at most"),
    ],
    ids=["missing", "control", "unknown", "twice", "no file", "base model", "long"],
)
async def test_a_form_that_is_wrong_is_refused_by_its_field(
    service: TestService, regular: Member, fields: dict[str, Any], file: bytes | None, text: str
) -> None:
    """A folder of PEFT leaves nothing either."""
    refused(await post(service, regular.a, fields, file=file, adapter_config=b"{}"), 400, "invalid_parameter", text)
    assert uploads(service) == []


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("text/plain", b"{}", 415, "unsupported_media_type"),
        ("application/json", b"{", 400, "invalid_json"),
        ("application/json", b"{}", 400, "invalid_parameter"),
        ("multipart/form-data", b"{}", 415, "unsupported_media_type"),
        ("multipart/form-data; boundary=b", b"nonsense", 400, "invalid_parameter"),
        ("multipart/form-data; boundary=b", FILE_PART + b"cut", 400, "invalid_parameter"),
        ("multipart/form-data; boundary=" + "b" * 300, b"", 400, "invalid_parameter"),
        ("multipart/form-data; boundary=b", NAME_PART + b"\xff\r\n--b--\r\n", 400, "invalid_parameter"),
    ],
    ids=["text", "no JSON", "empty JSON", "no boundary", "no form", "cut", "long boundary", "no UTF-8"],
)
async def test_a_body_that_is_no_form_is_refused(
    service: TestService, regular: Member, content_type: str, body: bytes, status: int, code: str
) -> None:
    headers = regular.a | {"Content-Type": content_type}
    refused(await service.client.post("/v1/loras", headers=headers, content=body), status, code)


@pytest.mark.parametrize(
    ("count", "size", "text"), [(10, 1, "allows 10 LoRAs"), (1, 2 * GIB, f"allows {2 * GIB} bytes")]
)
async def test_the_plans_quota_holds(service: TestService, member: Member, count: int, size: int, text: str) -> None:
    for _ in range(count):
        await registered(service, member, size_bytes=size)
    refused(await post(service, member.a), 409, "lora_quota_exceeded", text)
    assert uploads(service) == []


async def test_every_request_counts_against_the_plan(service: TestService) -> None:
    single = await service.member(plan_a="single")
    assert (await service.client.get("/v1/loras", headers=single.a)).status_code == 200
    refused(await post(service, single.a), 429, "rate_limit_exceeded")


@pytest.mark.parametrize("at_once", [3, 500])
async def test_loras_are_listed_newest_first_in_pages_and_filtered(
    service: TestService, member: Member, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are also where a page looks at few of them, and is short."""
    monkeypatch.setattr(catalog, "READ_AT_ONCE", at_once)
    monkeypatch.setattr(catalog, "LOOKED_AT_MOST", 2 * at_once)
    mine = [await registered(service, member, description="Ink.") for _ in range(3)]
    await registered(service, member, base_model="other", trigger_words=("ink",))
    seen: list[str] = []
    path = "/v1/loras?q=INK&base_model=pocket&limit=2"
    page: dict[str, Any] = {"next_cursor": ""}
    while "next_cursor" in page:
        after = f"&cursor={page['next_cursor']}" if page["next_cursor"] else ""
        page = (await service.client.get(path + after, headers=member.b)).json()
        seen += [lora["id"] for lora in page["loras"]]
    records = {each.id: each for each in await service.resources.catalog.adapters(member.account.id)}
    assert seen == sorted(mine, key=lambda lora_id: position_of(records[lora_id]), reverse=True)
    assert len((await service.client.get("/v1/loras?q=ink", headers=member.b)).json()["loras"]) == 4
    named = await registered(service, member, name="River Ink")
    path = "/v1/loras?name=river%20INK"
    assert [lora["id"] for lora in (await service.client.get(path, headers=member.b)).json()["loras"]] == [named]
    _, kept = await service.resources.api_keys.create(
        member.account.id, interfaces=frozenset({A}), adapters=frozenset({*mine, named, "model_gone"})
    )
    for query, wanted in (("q=ink", {*mine, named}), ("name=River Ink", {named})):
        answer = await service.client.get(f"/v1/loras?{query}", headers={"Authorization": f"Bearer {kept}"})
        assert {lora["id"] for lora in answer.json()["loras"]} == wanted
    for wrong in ("cursor=x", f"q={'a' * 101}", f"base_model={'a' * 129}", "limit=201"):
        answer = await service.client.get(f"/v1/loras?{wrong}", headers=member.b)
        refused(answer, 400, "invalid_parameter", wrong.partition("=")[0])


FOUND = {
    "summary": "pocket, rank 8", "family": "pocket", "rank": 8, "layers": 78, "targets": ["attention"],
    "components": ["unet"], "writer": "sd-scripts",
}  # fmt: skip
"""Earlier versions recorded these facts of a file, and no others."""
OF_TRAINING = {
    "algorithm": "DoRA",
    "suggested_trigger_words": ["ink drawing"],
    "metadata": {"ss_num_train_images": "40"},
}


async def test_what_a_file_says_of_its_training_is_for_its_owner(service: TestService, member: Member) -> None:
    lora_id = await registered(service, member, found=FOUND | OF_TRAINING)
    other = await service.member()
    await service.resources.adapter_grants.grant(lora_id, other.account.id)
    path, hidden = f"/v1/loras/{lora_id}", FOUND | OF_TRAINING
    assert (await service.client.get(path, headers=member.a)).json()["found"] == hidden
    del hidden["metadata"]
    assert (await service.client.get(path, headers=other.a)).json()["found"] == hidden
    listed = (await service.client.get("/v1/loras", headers=member.a)).json()["loras"]
    assert [lora["found"] for lora in listed if lora["id"] == lora_id] == [hidden]
    before = await registered(service, member, found=FOUND)
    shown = (await service.client.get(f"/v1/loras/{before}", headers=member.a)).json()["found"]
    assert shown == FOUND | {"algorithm": "", "suggested_trigger_words": []}


async def test_a_loras_sample_opens_for_all_who_may_use_it_once_it_is_drawn(
    service: TestService, member: Member
) -> None:
    lora_id = await registered(service, member)
    other = await service.member()
    await service.resources.adapter_grants.grant(lora_id, other.account.id)

    async def shown(caller: Member) -> list[str | None]:
        one = (await service.client.get(f"/v1/loras/{lora_id}", headers=caller.a)).json()
        listed = (await service.client.get("/v1/loras", headers=caller.a)).json()["loras"]
        return [one.get("sample_url"), *(lora.get("sample_url") for lora in listed if lora["id"] == lora_id)]

    assert await shown(member) == [None, None]
    job_id = await service.submit(member, lora_id=lora_id)
    await service.resources.lora_samples.begun(lora_id, job_id)
    assert await shown(member) == [None, None]
    await service.complete(job_id)
    for url in [*await shown(member), *await shown(other)]:
        assert url is not None
        assert (await service.client.get(url)).headers["content-type"] == "image/png"


async def test_a_lora_of_ones_own_is_changed_by_the_fields_that_are_sent(service: TestService, member: Member) -> None:
    lora_id = await registered(service, member, description="Before.")
    changed = await service.client.patch(
        f"/v1/loras/{lora_id}", headers=member.b, json={"name": " New ", "trigger_words": ["ink"]}
    )
    assert changed.status_code == 200
    found = changed.json()
    assert (found["name"], found["description"], found["trigger_words"]) == ("New", "Before.", ["ink"])
    adapter = existing(await service.resources.catalog.adapter(lora_id))
    assert (adapter.name, adapter.trigger_words, adapter.size_bytes) == ("New", ("ink",), 1000)
    for body, text in (
        ({"name": None}, "name: "),
        ({"trigger_words": [""]}, "trigger_words: "),
        ({"owner": "x"}, "unknown field"),
    ):
        answer = await service.client.patch(f"/v1/loras/{lora_id}", headers=member.a, json=body)
        refused(answer, 400, "invalid_parameter", text)
    assert (await service.client.patch(f"/v1/loras/{lora_id}", headers=member.a, json={})).json() == found


async def test_a_lora_is_shared_with_another_account_until_that_ends(service: TestService, member: Member) -> None:
    """Sharing ends by the account's name, which may be any text, or its id."""
    other = await service.member(name="acme/eu west")
    lora_id = await registered(service, member)
    path = f"/v1/loras/{lora_id}"
    shared = await service.client.post(f"{path}/grants", headers=member.a, json={"account": other.account.name})
    assert shared.json()["shared_with"] == [{"account_id": other.account.id, "name": other.account.name}]
    seen = (await service.client.get(path, headers=other.b)).json()
    assert seen["is_own"] is False
    assert "shared_with" not in seen
    job_id = await service.submit(other, lora_id=lora_id)
    for who, status in ((quote(other.account.name, safe=""), 204), (other.account.id, 404)):
        assert (await service.client.delete(f"{path}/grants/{who}", headers=member.a)).status_code == status
    assert (await service.client.get(path, headers=other.b)).status_code == 404
    await service.resources.queue.claim("tests", pool=(await _job(service, job_id)).kind, nonce="ends", limit=64)
    assert (await _job(service, job_id)).state is JobState.FAILED
    acts = [[row.act for row in await service.resources.audit.rows(who.account.id)] for who in (member, other)]
    assert acts == [["lora_granted", "lora_revoked"]] * 2
    answer = await service.client.post(f"{path}/grants", headers=member.a, json={"account": "nobody there"})
    refused(answer, 404, "not_found", "no such account")
    answer = await service.client.post(f"{path}/grants", headers=member.a, json={"account": member.account.id})
    refused(answer, 400, "invalid_parameter", "account: must not be your own account")


async def test_a_lora_of_ones_own_is_deleted(service: TestService, member: Member) -> None:
    lora_id = await registered(service, member)
    path = f"/v1/loras/{lora_id}"
    assert (await service.client.delete(path, headers=member.a)).status_code == 204
    refused(await service.client.delete(path, headers=member.a), 404, "not_found")
    assert await service.resources.catalog.adapter(lora_id) is None
    assert [row.act for row in await service.resources.audit.rows(member.account.id)] == ["lora_removed"]


@pytest.mark.parametrize("lora", ["another's", "shared", "open", "private", "unknown", "malformed"])
async def test_what_is_not_ones_own_cannot_be_changed_and_is_not_found(
    service: TestService, member: Member, lora: str
) -> None:
    """Every change of a LoRA that is another's is answered as of one that does not exist."""
    other = await service.member()
    owned = await registered(service, other)
    if lora == "shared":
        await service.resources.adapter_grants.grant(owned, member.account.id)
    known = {"another's": owned, "shared": owned, "open": LORA, "private": PRIVATE_ADAPTER, "malformed": "%00"}
    path = f"/v1/loras/{known.get(lora, 'model_' + 'z' * 26)}"
    answers = [
        await service.client.patch(path, headers=member.a, json={"name": "Mine"}),
        await service.client.delete(path, headers=member.b),
        await service.client.post(f"{path}/grants", headers=member.a, json={"account": member.account.name}),
        await service.client.delete(f"{path}/grants/{other.account.name}", headers=member.b),
    ]
    if lora not in ("shared", "open"):
        answers.append(await service.client.get(path, headers=member.a))
    for answer in answers:
        refused(answer, 404, "not_found")
        assert error_of(answer)["message"] == "There is no such LoRA."


async def _job(service: TestService, job_id: str) -> Any:
    return await service.resources.jobs.find(job_id)


async def test_a_lora_says_what_it_or_else_its_base_model_was_made_for(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        change_base_model(service.resources.settings.catalog, steps=8, guidance=1)
        add_base_model(service.resources.settings.catalog, "turbo")
        await service.resources.applied_catalog.apply_file()
        member = await service.member()
        said = {
            await registered(service, member): (8, 1.0),
            await registered(service, member, steps=4): (4, 1.0),
            await registered(service, member, guidance=1.5): (8, 1.5),
            await registered(service, member, base_model="other"): (None, None),
        }
        listed = (await service.client.get("/v1/loras", headers=member.b)).json()["loras"]
        for lora in (each for each in listed if each["id"] in said):
            assert (lora.get("recommended_steps"), lora.get("recommended_guidance")) == said[lora["id"]]
            assert (await service.client.get(f"/v1/loras/{lora['id']}", headers=member.b)).json() == lora | {
                "shared_with": []
            }
        assert len(listed) >= len(said)
        of = {lora["id"]: (lora["base_model"], lora["base_models"]) for lora in listed}
        other = of.pop([*said][-1])
        assert other == ("other", []), "it is not offered any more"
        assert all(each == ("pocket", ["pocket", "turbo"]) for each in of.values())
        for name, found in (("turbo", {*of}), ("pocket", {*of}), ("other", {[*said][-1]})):
            drawn_on = (await service.client.get(f"/v1/loras?base_model={name}", headers=member.b)).json()["loras"]
            assert {lora["id"] for lora in drawn_on} == found
