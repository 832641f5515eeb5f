"""The chart copies Redis on a schedule, and keeps whole copies only. `tests/cli/test_restore.py` puts one back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from serve_app.store.redis_process import server_binary
from tests.manifests.chart import merge, profile_values, render
from tests.manifests.pods import Pod, pods
from tests.manifests.rules import broken_rules
from tests.store.redis_servers import of_oldest_redis, server
from tests.support import plain_redis, until

PROGRAMS = {
    "valkey-cli": 'shift 2; exec {client} -p "$PORT" "$@"',
    "valkey-check-rdb": 'exec -a valkey-check-rdb {server} "$@"',
    "python": 'exec {python} "$@"',
}
"""What stands in for the image's programs. The copy names its server by two words, `-h` and a host."""


def backup_pod(**backup: Any) -> Pod:
    """The pod of the schedule."""
    change = {"redis": {"jobs": {"backup": {"enabled": True, **backup}}}}
    documents = render(merge(profile_values("production"), change))
    own = f"PersistentVolumeClaim/{backup.get('persistence', {}).get('existingClaim')}"
    assert [broken for broken in broken_rules(documents) if not broken.endswith(own)] == []
    (pod,) = [each for each in pods(documents) if each.component == "redis-backup"]
    return pod


class Machine:
    """A folder with the programs of both images, a Redis password and a place for copies."""

    def __init__(self, home: Path, port: int) -> None:
        self.copies = home / "copies"
        for folder in (home / "bin", self.copies):
            folder.mkdir()
        found = {"client": of_oldest_redis("redis-cli"), "server": server_binary(), "python": sys.executable}
        for name, command in PROGRAMS.items():
            (home / "bin" / name).write_text(f"#!/bin/bash\n{command.format(**found)}\n")
            (home / "bin" / name).chmod(0o755)
        (home / "password").write_text("pass")
        path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {"PATH": path, "PORT": str(port), "KEY_FILE": str(home / "password")}

    def run(self, container: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        written = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        environment = os.environ | written | self._environment | {"FOLDER": str(self.copies)}
        command = [*container["command"], *container["args"]]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in self.copies.iterdir())


@pytest.mark.slow
def test_a_whole_copy_takes_the_place_of_the_oldest_and_goes_to_the_bucket(tmp_path: Path) -> None:
    pod = backup_pod(keep=1, url=(tmp_path / "bucket").as_uri())
    copy, upload = pod.containers
    (password,) = [volume["secret"] for volume in pod.spec["volumes"] if volume["name"] == "password"]
    assert password["items"] == [{"key": "redis-operator-password", "path": "password"}]
    with server(tmp_path / "source", ["user default off", "user operator on >pass ~* &* +@all"]) as port:
        client, machine = plain_redis(f"redis://operator:pass@127.0.0.1:{port}"), Machine(tmp_path, port)
        until(lambda: _answers(client))
        client.set("job", "accepted")
        older = machine.copies / "redis-20260101T000000Z.rdb"
        older.touch()
        done = machine.run(copy)
        assert done.returncode == 0, done.stderr
        (name,) = machine.names
        assert name != older.name
        assert (machine.copies / name).stat().st_mode & 0o077 == 0
        (tmp_path / "bucket").mkdir()
        done = machine.run(upload)
        assert done.returncode == 0, done.stderr
    (uploaded,) = (tmp_path / "bucket").iterdir()
    assert uploaded.read_bytes() == (machine.copies / name).read_bytes()


def _answers(client: Any) -> bool:
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


@pytest.mark.slow
def test_what_is_not_whole_gets_no_name_and_pushes_no_copy_out(tmp_path: Path) -> None:
    (copy,) = backup_pod(keep=1).containers
    machine = Machine(tmp_path, port=1)
    older = machine.copies / "redis-20260101T000000Z.rdb"
    older.touch()
    assert machine.run(copy).returncode != 0, "no server answers"
    (tmp_path / "bin" / "valkey-cli").write_text('#!/bin/bash\necho REDIS0011 > "${!#}"\n')
    assert machine.run(copy).returncode != 0, "the copy ends in its middle"
    assert older.name in machine.names
    assert [name for name in machine.names if name.endswith(".rdb")] == [older.name]


def test_copies_go_to_a_volume_where_no_bucket_is_named() -> None:
    volumes = {volume["name"]: volume for volume in backup_pod().spec["volumes"]}
    assert volumes["backup"]["persistentVolumeClaim"]["claimName"] == "atelier-redis-backup"
    own = backup_pod(persistence={"existingClaim": "mine"}).spec["volumes"]
    assert {"claimName": "mine"} in [volume.get("persistentVolumeClaim") for volume in own]
