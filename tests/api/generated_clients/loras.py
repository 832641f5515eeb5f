"""Makes the round trip of the LoRAs' document with a generated client: upload, find, change, refuse, delete.

openapi-python-client generated it.
"""

# pyright: basic, reportMissingImports=false
import json
import sys
from io import BytesIO
from pathlib import Path

from client_loras import AuthenticatedClient
from client_loras.api.lo_r_as import add_lora, change_lora, delete_lora, get_lora, list_loras
from client_loras.models import AddLoraFilesBody, AddLoraJsonBody, ErrorResponse, Lora, LoraChange, Loras
from client_loras.types import File


def main(base_url: str, key: str, file: str) -> None:
    client = AuthenticatedClient(base_url=base_url, token=key)
    weights = File(BytesIO(Path(file).read_bytes()), "ink.safetensors", "application/octet-stream")
    form = AddLoraFilesBody(name="Python's", base_model="pocket", trigger_words="ink, paper", file=weights)
    added = add_lora.sync(client=client, body=form)
    assert isinstance(added, Lora), added
    listed = list_loras.sync(client=client, name="python's")
    assert isinstance(listed, Loras), listed
    assert [lora.id for lora in listed.loras] == [added.id]
    changed = change_lora.sync(added.id, client=client, body=LoraChange(trigger_words=["ink drawing"]))
    assert isinstance(changed, Lora), changed
    refused = add_lora.sync(client=client, body=AddLoraJsonBody(name="x", base_model="pocket", sha256="x"))
    assert isinstance(refused, ErrorResponse), refused
    delete_lora.sync(added.id, client=client)
    gone = get_lora.sync(added.id, client=client)
    assert isinstance(gone, ErrorResponse), gone
    sys.stdout.write(json.dumps([changed.trigger_words[0], refused.error.code.value, gone.error.code.value]))


main(*sys.argv[1:])
