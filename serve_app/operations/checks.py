"""Checks packages, data directory, disks, ports and GPU of this machine.

Each check of `atelier doctor`, here and in other modules, yields its results as `Check`.
"""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve_app.jobs.images import ImageStore
from serve_app.settings import Settings
from serve_app.store.storage import free_bytes, local_folders, open_to_others


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, its level, what was found, and advice when it is not ok."""

    name: str
    level: Level
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Level.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.FAIL, found, advice)


PACKAGES = ("ray", "torch", "diffusers", "transformers", "safetensors", "fastapi", "starlette", "redis", "fsspec")
LOW_DISK_BYTES = 2 << 30
"""2 GiB hold a few thousand images of 0.3 to 1 MB and the copy that Redis writes when it rewrites its file."""


def check_versions() -> Iterable[Check]:
    """Report versions from the packages' metadata: importing torch takes seconds."""
    found, missing = [f"python {sys.version.split()[0]}"], list[str]()
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        yield fail("versions", f"not installed: {', '.join(missing)}", "make setup")
    yield ok("versions", ", ".join(found))


def check_data_directory(settings: Settings) -> Iterable[Check]:
    place = settings.data_dir.resolve()
    if not place.exists():
        above = next(parent for parent in place.parents if parent.exists())
        if not os.access(above, os.W_OK):
            yield fail("data directory", f"{place} cannot be created in {above}", "choose another with --data-dir")
        else:
            yield ok("data directory", f"{place} (created at the first start)")
    elif not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        advice = "chown it to this user, or choose another with --data-dir"
        yield fail("data directory", f"{place} is not writable", advice)
    else:
        yield ok("data directory", str(place))


def check_disks(settings: Settings) -> Iterable[Check]:
    """Check the disks that the service fills, as it does itself before it accepts a job."""
    try:
        images = ImageStore(settings).local_folder
    except (ImportError, ValueError):
        images = None  # the check of the storage reports why
    for folder in local_folders(settings, images):
        free = free_bytes(folder)
        reserve = f"{settings.disk_reserve / 1e6:.0f} MB"
        found = f"{folder}: {free / 1e9:.1f} GB free, {reserve} in reserve"
        if free < settings.disk_reserve:
            yield fail("disk", found, f"free some space: below {reserve} (ATELIER_DISK_RESERVE) new jobs are refused")
        elif free < LOW_DISK_BYTES:
            yield warn("disk", found, "free some space: with a full disk Redis accepts no jobs")
        else:
            yield ok("disk", found)


def check_privacy(settings: Settings) -> Iterable[Check]:
    """Name what other users can open of the data directory, Ray's token, and HAProxy's files and sockets."""
    places = [settings.data_dir.resolve(), *_private_places(os.environ)]
    found = {place: open_to_others(place) for place in places}
    for place, paths in found.items():
        if paths:
            names = ", ".join(str(path) for path in paths)
            yield warn("privacy", f"other users can open {names}", f"chmod -R go= {place}")
    if settings.data_dir.exists() and not any(found.values()):
        yield ok("privacy", "only this user can open the data directory, Ray's token and HAProxy's sockets")


def _private_places(environment: Mapping[str, str]) -> Iterator[Path]:
    """List the files of Ray and HAProxy outside the data directory, as configured or by default."""
    yield Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if own := environment.get("RAY_SERVE_HAPROXY_SOCKET_PATH"):
        yield Path(own).parent
    # directories made by `runtime_home` in deployments/runtime.py
    homes = Path("/tmp").glob("atelier-" + "[0-9a-f]" * 10)
    yield from (home for home in homes if home.lstat().st_uid == os.getuid())


def check_gpu() -> Iterable[Check]:
    if shutil.which("nvidia-smi") is None:
        found = "no nvidia-smi: images are generated on the CPU"
        yield warn("gpu", found, "fine for the pocket model; use a GPU for larger ones")
        return
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        yield fail("gpu", f"nvidia-smi failed ({type(error).__name__})", "check the driver: run nvidia-smi")
        return
    for line in done.stdout.strip().splitlines():
        yield ok("gpu", line)
    if "+cpu" in version("torch"):
        yield warn("gpu", f"torch {version('torch')} is built without CUDA", "install a CUDA build of torch")
    yield from _check_kernels()


TRY_KERNELS = [sys.executable, "-c", "from serve_app.engine.kernels import main; main()"]


def _check_kernels() -> Iterable[Check]:
    """Try the engine's kernels as a start does, in a process of its own: this one loads no torch."""
    try:
        done = subprocess.run(TRY_KERNELS, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        yield warn("kernels", "they took too long to be tried", "see what a generator's log says of them")
        return
    found = done.stdout.strip() or "they could not be tried: " + done.stderr.strip().rpartition("\n")[2]
    yield warn("kernels", found, "see docs/operate/sizing.md") if done.returncode else ok("kernels", found)


def cannot_listen(host: str, port: int) -> str | None:
    """The reason why the address cannot be listened on; None when it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        return None
