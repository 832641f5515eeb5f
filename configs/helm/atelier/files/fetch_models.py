"""Fetches the models of a list into a folder, each once.

    fetch_models.py [--wait] MODELS.json FOLDER

An entry is {"name", "repository", "revision", "include"} of a model hub, or {"name", "url"} of anything fsspec reads. A
model is fetched beside its place and moved there when it is whole. With `--wait` nothing is fetched: the program ends
when all models of the list are there.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

POLL_S = 1.0
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
    for model in models:
        if not is_there(model, options.folder):
            print(f"fetching {model['name']}", flush=True)
            put(model, options.folder)


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


def put(model: dict, folder: Path) -> None:
    """Fetch, then swap: a reader sees the old folder or the whole new one."""
    draft, place, old = (folder / f"{prefix}{model['name']}" for prefix in (".draft-", "", ".old-"))
    fetch(model, draft)
    (draft / MARK).write_text(json.dumps(model))
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    draft.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def fetch(model: dict, draft: Path) -> None:
    """Into `draft`, which may hold what an interrupted fetch left."""
    if "url" in model:
        import fsspec

        shutil.rmtree(draft, ignore_errors=True)
        files, path = fsspec.url_to_fs(model["url"])
        files.get(path.rstrip("/") + "/", f"{draft}/", recursive=True)
    else:
        from huggingface_hub import snapshot_download

        snapshot_download(
            model["repository"],
            revision=model["revision"],
            allow_patterns=model.get("include"),
            local_dir=draft,
        )


if __name__ == "__main__":
    main()
