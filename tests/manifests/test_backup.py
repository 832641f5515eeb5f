"""The chart copies Redis on a schedule and keeps whole copies. `tests/cli/test_restore.py` puts one back."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serve_app.store.keys import redis_key
from tests.manifests.chart import merge, profile_values, render
from tests.manifests.pods import Pod, pods
from tests.manifests.rules import broken_rules
from tests.store.redis_servers import server
from tests.support import ROOT, free_port, plain_redis

USERS = ["user default off", "user operator on >pass ~* &* +@all"]
OLDER = "redis-20260101T000000Z.rdb"


def backup_pod(**backup: Any) -> Pod:
    """The pod of the schedule."""
    change = {"redis": {"jobs": {"backup": {"enabled": True, **backup}}}}
    documents = render(merge(profile_values("production"), change))
    own = f"PersistentVolumeClaim/{backup.get('persistence', {}).get('existingClaim')}"
    assert [broken for broken in broken_rules(documents) if not broken.endswith(own)] == []
    (pod,) = [each for each in pods(documents) if each.component == "redis-backup"]
    return pod


def start(pod: Pod, folder: Path, port: int) -> "subprocess.Popen[str]":
    """Start what the pod runs, with its volume in `folder`."""
    (container,) = pod.containers
    written = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert written["ATELIER_REDIS_URL"].startswith("redis://operator:$(REDIS_JOBS_PASSWORD)@")
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    address = {"ATELIER_REDIS_URL": f"redis://operator:pass@127.0.0.1:{port}", "PYTHONPATH": str(ROOT), "PATH": path}
    command = [word.replace("/backup", str(folder)) for word in container["command"]]
    return subprocess.Popen(command, env=os.environ | address, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_copy_is_made_in_the_same_pod_once_redis_answers(tmp_path: Path, in_bucket: bool) -> None:
    copies, port = tmp_path / "copies", free_port()
    copies.mkdir()
    (copies / OLDER).touch()
    pod = backup_pod(keep=1, url=copies.as_uri() if in_bucket else "")
    with start(pod, copies, port) as copying:
        assert copying.stderr
        assert "cannot be reached" in copying.stderr.readline()
        with server(tmp_path / "source", USERS, port=port):
            assert copying.wait(timeout=60) == 0
            assert plain_redis(f"redis://operator:pass@127.0.0.1:{port}").get(redis_key("copied"))
    copy, *others = sorted((each for each in copies.iterdir()), reverse=True)
    assert [each.name for each in others] == ([OLDER] if in_bucket else []), "a bucket has rules of its own"
    assert copy.stat().st_mode & 0o077 == 0
    assert copy.read_bytes()[-9] == 0xFF, "the end of a snapshot, before its checksum"


def test_copies_go_to_a_volume_where_no_bucket_is_named() -> None:
    pod, production = backup_pod(), pods(render(profile_values("production")))
    assert all(
        each.containers[0]["command"][:4] == pod.containers[0]["command"][:4]
        for each in production
        if each.name.startswith("Job/")
    ), "other jobs try again as it does"
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    assert volumes["backup"]["persistentVolumeClaim"]["claimName"] == "atelier-redis-backup"
    own = backup_pod(persistence={"existingClaim": "mine"}).spec["volumes"]
    assert {"claimName": "mine"} in [volume.get("persistentVolumeClaim") for volume in own]
