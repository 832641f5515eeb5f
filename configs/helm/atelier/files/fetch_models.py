"""Fetches the models of a list into a folder, each once.

    fetch_models.py [--wait] MODELS.json FOLDER

An entry is {"name", "repository", "revision", "include"} of a model hub, or {"name", "url", "options"} of anything
fsspec reads: without options by those of the storage, where it is of the same kind, and with the key and secret in
MODEL_<place in the list>_KEY and _SECRET, where they are set. A model is fetched beside its place, compared with its
source's list of files and moved there when it is whole. With `--wait` nothing is fetched: the program ends when all
models of the list are there.
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL_S, TELL_EVERY_S = 1.0, 10.0
MARK = ".source.json"
"""In a model's folder: the entry it was fetched for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wait", action="store_true", help="wait until another process has fetched them")
    parser.add_argument("models", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    models = json.loads(options.models.read_text())
    if options.wait:
        wait(models, options.folder)
        return
    for place, model in enumerate(models):
        if is_there(model, options.folder):
            continue
        try:
            put(model, options.folder, *source(model, place))
        except Exception as error:  # noqa: BLE001 - the library of any storage raises its own
            sys.exit(f"{model['name']} was not fetched: {type(error).__name__}: {error}")


def wait(models: list[dict], folder: Path) -> None:
    reported: list[str] = []
    while missing := [model["name"] for model in models if not is_there(model, folder)]:
        if missing != reported:
            print(f"waiting for {', '.join(missing)}", flush=True)
        reported = missing
        time.sleep(POLL_S)


def is_there(model: dict, folder: Path) -> bool:
    try:
        return json.loads((folder / model["name"] / MARK).read_text()) == model
    except (FileNotFoundError, ValueError):
        return False


Sizes = dict[str, int]
"""The bytes of each file, by its path in the folder."""
Fetch = Callable[[Path], object]
"""Fetches into a folder, which may hold what an interrupted fetch left."""


def put(model: dict, folder: Path, sizes: Sizes, fetch: Fetch) -> None:
    """Fetch, then swap: a reader sees the old folder or the whole new one."""
    draft, place, old = (folder / f"{prefix}{model['name']}" for prefix in (".draft-", "", ".old-"))
    ended, whole = threading.Event(), sum(sizes.values())
    print(f"fetching {model['name']}: {len(sizes)} files, {whole / 1e6:,.1f} MB", flush=True)

    def tell() -> None:
        while not ended.wait(TELL_EVERY_S):
            had = sum(path.stat().st_size for path in list(draft.rglob("*")) if path.is_file())
            print(f"{model['name']}: {had / 1e6:,.1f} of {whole / 1e6:,.1f} MB", flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        fetch(draft)
    finally:
        ended.set()
    for name, size in sizes.items():
        if (found := (draft / name).stat().st_size) != size:
            shutil.rmtree(draft)
            raise OSError(f"{name} has {found} of {size} bytes")
    (draft / MARK).write_text(json.dumps(model))
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    draft.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{model['name']} is there", flush=True)


def source(model: dict, place: int) -> tuple[Sizes, Fetch]:
    """What a model consists of, and how it is fetched."""
    if "url" in model:
        return of_storage(model["url"], model.get("options"), place)
    from huggingface_hub import HfApi, RepoFile, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    named = {"revision": model["revision"]}
    tree = HfApi().list_repo_tree(model["repository"], recursive=True, **named)
    files = [file for file in tree if isinstance(file, RepoFile)]
    wanted = filter_repo_objects(files, allow_patterns=model.get("include"), key=lambda file: file.path)
    named |= {"allow_patterns": model.get("include")}
    return {file.path: file.size for file in wanted}, lambda draft: snapshot_download(
        model["repository"], local_dir=draft, **named
    )


def of_storage(url: str, options: dict | None, place: int) -> tuple[Sizes, Fetch]:
    import fsspec

    if options is None:
        is_same = url.partition(":")[0] == os.environ.get("ATELIER_STORAGE_URL", "").partition(":")[0]
        options = json.loads(os.environ.get("ATELIER_STORAGE_OPTIONS", "{}")) if is_same else {}
    own = {name: os.environ.get(f"MODEL_{place}_{name.upper()}") for name in ("key", "secret")}
    files, path = fsspec.url_to_fs(url, **options, **{name: value for name, value in own.items() if value})
    root = path.rstrip("/") + "/"
    sizes = {name.removeprefix(root): file["size"] for name, file in files.find(root, detail=True).items()}
    if not sizes:
        raise FileNotFoundError(f"there is nothing at {url}")

    def fetch(draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        files.get(root, f"{draft}/", recursive=True)

    return sizes, fetch


if __name__ == "__main__":
    main()
