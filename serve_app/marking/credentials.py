"""C2PA's content credentials, by the library of the Content Authenticity Initiative: signs pictures, and reads them.

The library is loaded when it is first needed: 30 MB that no service loads where nothing is marked. Nothing is asked of
the network: no time-stamp server, no list of revocations, no manifest that a file says is elsewhere.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from io import BytesIO
from typing import Any

from serve_app.marking.certificates import BadMarking, Credentials
from serve_app.marking.xmp import SourceType

_OPTIONS: Mapping[str, Any] = {
    "verify": {"remote_manifest_fetch": False, "verify_after_sign": False},
    "builder": {"thumbnail": {"enabled": False}, "created_assertion_labels": ["c2pa.actions"]},
}
_NO_LIST, _ENDED = "signingCredential.untrusted", "signingCredential.expired"
"""What C2PA says of every signer where there is no trust list, and of one whose certificate has ended by now."""
MOST_PROBLEMS = 10
"""A stranger's manifest may have thousands, most of them the same."""


def missing_library() -> str:
    """Return why C2PA's library cannot be loaded; empty where it is."""
    try:
        import_module("c2pa")
    except (ImportError, OSError, RuntimeError) as error:
        return f"the library c2pa-python cannot be loaded ({error}); install it, or leave marking off"
    return ""


def signed(content: bytes, media_type: str, source: SourceType, credentials: Credentials) -> bytes:
    """Return a file with a manifest in it, which says when and how it was made. Raises `BadMarking`.

    Any thread may call it.
    """
    if missing := missing_library():
        raise BadMarking(f"ATELIER_MARK_IMAGES: {missing}")
    import c2pa

    generator = {"name": "Atelier", "version": version("atelier")}
    made = {
        "action": "c2pa.created",
        "digitalSourceType": source.uri,
        "softwareAgent": generator,
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    manifest = {
        "claim_generator_info": [generator],
        "format": media_type,
        "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [made]}}],
    }
    chain, key, algorithm, *_ = credentials
    target = BytesIO()
    try:
        info = c2pa.C2paSignerInfo(algorithm.encode(), chain, key, None)
        with (
            c2pa.Context(c2pa.Settings.from_dict(dict(_OPTIONS))) as context,
            c2pa.Signer.from_info(info) as signer,
            c2pa.Builder(manifest, context) as builder,
        ):
            builder.sign(signer, media_type, BytesIO(content), target)
    except c2pa.C2paError as error:
        raise BadMarking(f"ATELIER_MARKING_CERTIFICATE: it cannot sign: {error}") from error
    return target.getvalue()


def read_manifest(content: bytes, media_type: str) -> Mapping[str, Any] | None:
    """Return what a file's newest manifest says, and whether it holds; None for a file without one.

    `state` is C2PA's: `Valid` where nothing has changed since it was signed, `Trusted` where the signer is on a trust
    list too (this reader has none), otherwise `Invalid`. Two of C2PA's invalid are told apart: `Ended` where nothing is
    wrong but that the certificate has ended by now, and `Elsewhere` where the file only says where its manifest is.
    `Unread` says that C2PA's library is not there. `problems` are C2PA's codes of what does not hold, each once, or say
    where it is, or what is missing.
    """
    if missing := missing_library():
        return _unread("Unread", missing)
    import c2pa

    try:
        with c2pa.Context(c2pa.Settings.from_dict(dict(_OPTIONS))) as context:
            reader = c2pa.Reader.try_create(media_type, BytesIO(content), context=context)
            if reader is None:
                return None
            with reader:
                store, state = json.loads(reader.json()), str(reader.get_validation_state())
    except c2pa.C2paError as error:
        address = str(error).removeprefix("Remote: must fetch remote manifests from url ")
        return _unread("Invalid" if address == str(error) else "Elsewhere", address)
    manifest = store["manifests"][store["active_manifest"]]
    signature = manifest.get("signature_info", {})
    actions = [
        action
        for assertion in manifest.get("assertions", ())
        if assertion["label"].startswith("c2pa.actions")
        for action in assertion["data"]["actions"]
    ]
    made = next((action for action in actions if "digitalSourceType" in action), {})
    problems = list(dict.fromkeys(row["code"] for row in store.get("validation_status", ()) if row["code"] != _NO_LIST))
    return {
        "state": "Ended" if problems == [_ENDED] else state,
        "problems": problems[:MOST_PROBLEMS],
        "signer": ", ".join(filter(None, (signature.get("common_name"), signature.get("issuer")))),
        "source_type": made.get("digitalSourceType", "").rpartition("/")[2],
        "when": made.get("when", ""),
    }


def _unread(state: str, problem: str) -> Mapping[str, Any]:
    return {"state": state, "problems": [problem[:200]], "signer": "", "source_type": "", "when": ""}
