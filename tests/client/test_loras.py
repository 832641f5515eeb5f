"""LoRAs through both clients: added with progress, listed in pages, changed, shared and deleted."""

import json
from pathlib import Path

import httpx
import pytest

from serve_app.client import AsyncClient, Client, InvalidRequest, Lora, NotFound, lora_calls, upload
from serve_app.loras.catalog_file import add_digests
from tests.client.conftest import LossyTransport, terminal
from tests.live import Live
from tests.support import POCKET, adapter_id, adapter_of

pytestmark = pytest.mark.usefixtures("shared_layer_tables")
OUTLINE = POCKET / "loras" / "outline.safetensors"


def test_the_bar_ends_with_an_upload_that_is_interrupted() -> None:
    class Interrupted(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise KeyboardInterrupt

    with terminal() as shown, Client("http://service.test", "atl_key", transport=Interrupted()) as client:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            client.loras.add(OUTLINE, base="pocket", progress=True)
        assert shown().endswith("\r\x1b[2K"), interrupted


@pytest.mark.slow
async def test_a_lora_is_added_used_changed_shared_and_deleted_with_both_clients(live: Live) -> None:
    (account, key), (zeta, _) = live.member(), live.member("zeta")
    sent: list[tuple[int, int]] = []
    with Client(live.base_url, key, transport=LossyTransport(1, "POST")) as client:
        added = client.loras.add(
            OUTLINE, base="pocket", trigger_words=["ink drawing"], on_progress=lambda *each: sent.append(each)
        )
        assert (added.name, added.trigger_words, added.is_own) == ("outline", ("ink drawing",), True)
        assert added.summary.startswith("pocket, rank 8")
        size = OUTLINE.stat().st_size
        assert sent.count((size, size)) == 2, "the lost answer's upload was sent again"
        assert live.run(live.resources.catalog.owned_ids(account.id)) == [added.id]
        assert client.generate("a boat", lora_id=added.id).wait(timeout=20).done
        assert client.loras.share(added.id, zeta.name).shared_with == {zeta.id: zeta.name}
        client.loras.unshare(added.id, zeta.id)
    async with AsyncClient(live.base_url, key, interface="b") as asynchronous:
        with terminal() as shown:
            again = await asynchronous.loras.add(OUTLINE, base="pocket", name="Another", progress=True)
            assert "Checking Another" in shown()
        assert (again.id, again.shared_with) == (added.id, {})
        changed = await asynchronous.loras.update(added.id, name="Ink", trigger_words=[])
        assert (changed.name, changed.trigger_words) == ("Ink", ())
        assert await asynchronous.loras.get(added.id) == changed
        await asynchronous.loras.delete(added.id)
        with pytest.raises(NotFound):
            await asynchronous.loras.get(added.id)


@pytest.mark.slow
def test_all_pages_are_listed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_calls, "PAGE", 3)
    listed = client.loras.list(base_model="pocket")
    assert len({lora.id for lora in listed}) == len(listed) == 8
    neon = client.loras.list(q="NEON")
    assert [lora.id for lora in neon] == [adapter_id("neon")]
    assert isinstance(neon[0], Lora)
    with pytest.raises(InvalidRequest, match="there is no base model"):
        client.loras.add(OUTLINE, base="none")


def test_large_weights_that_the_account_has_are_not_sent_again(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_calls, "ASK_FROM_BYTES", 0)
    peft, sent = tmp_path / "peft", list[tuple[int, int]]()
    peft.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (peft / name).write_text(name)
    account, key = live.member()
    with Client(live.base_url, key) as client:
        for path, is_folder in ((OUTLINE, False), (peft, True)):
            record = adapter_of(account.id, file=str(path), sha256="", is_folder=is_folder)
            (record,) = add_digests([record], {}, {}).adapters
            live.run(live.resources.adapter_registry.register(record))
            had = client.loras.add(path, base="pocket", on_progress=lambda *each: sent.append(each))
            assert (had.id, sent) == (record.id, [])
        with pytest.raises(InvalidRequest, match="there is no base model"):
            client.loras.add(peft / "adapter_config.json", base="none", on_progress=lambda *each: sent.append(each))
        assert sent, "what is not known is sent"
        with pytest.raises(InvalidRequest, match="source: fetching is not enabled"):
            client.loras.add(source="s3://acme/ink.safetensors", base="pocket")
        with pytest.raises(ValueError, match="either a path or a source"):
            client.loras.add(base="pocket")
        with pytest.raises(ValueError, match="either progress or on_progress"):
            client.loras.add(OUTLINE, base="pocket", progress=True, on_progress=print)


def test_a_peft_folder_is_two_files(tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        with pytest.raises(FileNotFoundError, match=name):
            upload.lora_files(tmp_path)
        (tmp_path / name).write_text(json.dumps({}))
    assert set(upload.lora_files(tmp_path)) == {"file", "adapter_config"}
