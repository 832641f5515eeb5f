"""Builds the guide from `docs/` and the documents beside it: static pages, each as Markdown too, for any web server.

    .venv/bin/python configs/guide/build.py FOLDER

Zensical makes the pages, and fails for a link that leads nowhere. Added to them are each page's Markdown at its address
with `.md`, an `llms.txt`, compressed copies for servers that send them, and the content policy that the pages need.
"""

import fcntl
import gzip
import os
import re
import shutil
import subprocess
import sys
import tomllib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BESIDE = {
    "CONTRIBUTING.md": "contribute/index.md",
    "CHANGELOG.md": "operate/changes.md",
    "SECURITY.md": "operate/security.md",
    "benchmarks/RESULTS.md": "understand/results.md",
    "benchmarks/many-loras.md": "understand/many-loras-benchmark.md",
    "configs/helm/atelier/README.md": "operate/chart.md",
    "models/pocket/README.md": "draw/bundled-model.md",
    "models/pocket/contact_sheet.png": "draw/contact_sheet.png",
    "configs/guide/atelier.css": "atelier.css",
    "configs/guide/search.js": "search.js",
    "serve_app/web/site/static/mark.svg": "images/mark.svg",
    "tests/faults/README.md": "contribute/faults.md",
}
"""Files that stand elsewhere in the repository, and their places in the guide."""
NOWHERE = "http://atelier.invalid"
"""Zensical wants a host for pages that may be shown anywhere: it is taken out of them again."""
POLICY = "content-security-policy.txt"
BESIDE_IT = ".atelier-guide-"
"""A folder with this name and an ending holds a site on its way; one that is there before was left by a killed build."""
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s#]+)")
INLINE_SCRIPT = re.compile(r"<script(?![^>]* src=)(?![^>]*json)[^>]*>(.*?)</script>", re.DOTALL)
COMPRESSED = {".html", ".css", ".js", ".json", ".md", ".svg", ".txt"}


def main(into: Path) -> None:
    if into.exists() and not (into / POLICY).exists() and (into.is_file() or any(into.iterdir())):
        sys.exit(f"{into} holds something else than a guide: name a folder that is empty, or not there yet")
    with open(__file__) as own, TemporaryDirectory() as folder:
        fcntl.flock(own, fcntl.LOCK_EX)  # another build waits, as of a second `make`
        project = Path(folder)
        shutil.copytree(HERE, project, dirs_exist_ok=True)
        places = {ROOT / source: Path(place) for source, place in _places()}
        for source, place in places.items():
            _write(project / "docs" / place, _moved(source, places))
        command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
        if subprocess.run(command, cwd=project, env={**os.environ, "NO_COLOR": "1"}).returncode:
            sys.exit("The guide has not been built: a link leads nowhere, or a file cannot be read (see above)")
        site = project / "site"
        settings = tomllib.loads((HERE / "zensical.toml").read_text())["project"]
        (site / "sitemap.xml").unlink()  # it would need the host
        for page in site.rglob("*.html"):
            text = page.read_text().replace(NOWHERE, "").replace('"base":"/guide"', '"base":"/guide/"')  # of its 404
            page.write_text(re.sub(r"\s*<link rel=.canonical.*?>", "", text))  # it would need the host, too
        for page in (project / "docs").rglob("*.md"):
            shutil.copy(page, site / page.relative_to(project / "docs"))
        _write(site / "llms.txt", "\n".join(_index(settings, project / "docs")).encode())
        _write(site / POLICY, _policy(site).encode())
        for file in [each for each in site.rglob("*") if each.suffix in COMPRESSED]:
            _write(file.with_name(f"{file.name}.gz"), gzip.compress(file.read_bytes(), mtime=0))
        into.parent.mkdir(parents=True, exist_ok=True)
        for left in into.parent.glob(f"{BESIDE_IT}*"):
            shutil.rmtree(left)
        with TemporaryDirectory(prefix=BESIDE_IT, dir=into.parent) as beside:  # so that nobody ever meets a half
            shutil.copytree(site, new := Path(beside) / "new")
            if into.exists():
                into.rename(Path(beside) / "old")
            new.rename(into)


def _places() -> Iterator[tuple[str, str]]:
    """Yield each file of the guide with its place there."""
    for folder, _, names in os.walk(ROOT / "docs"):
        for name in names:
            path = (Path(folder) / name).relative_to(ROOT)
            if path.suffix != ".py":
                yield str(path), str(path.relative_to("docs"))
    yield from BESIDE.items()


def _moved(source: Path, places: Mapping[Path, Path]) -> bytes:
    """Return what a file holds, a document's links as they lead from its new place."""
    if source.suffix != ".md":
        return source.read_bytes()

    def led(link: re.Match[str]) -> str:
        target = places.get((source.parent / link[2]).resolve())
        return link[0] if target is None else f"{link[1]}{os.path.relpath(target, places[source].parent)}"

    text = re.sub(r"\A---\n.*?\n---\n+", "", source.read_text(), flags=re.DOTALL)  # a model card's, for model hubs
    return LINK.sub(led, text).encode()


def _index(settings: Mapping[str, Any], pages: Path) -> Iterator[str]:
    """Yield the lines of `llms.txt` (https://llmstxt.org): every page of the navigation, with what it begins with."""
    yield f"# {settings['site_name']}\n\n> {settings['site_description']}\n"
    for section in settings["nav"]:
        for title, entries in section.items():
            yield f"## {title}\n"
            yield from (_entry(path, (pages / path).read_text()) for path in _paths(entries))
            yield ""


def _paths(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for each in entry if isinstance(entry, list) else entry.values():
        yield from _paths(each)


def _entry(path: str, text: str) -> str:
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    first = re.search(r"^[A-Z`*\[].*?(?=\n\n|\Z)", text.partition("\n\n")[2], re.DOTALL | re.MULTILINE)
    said = " ".join(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", first[0], flags=re.DOTALL).split()) if first else ""
    return f"- [{title[1] if title else path}]({path}): {re.split(r'(?<=[.:]) ', said)[0].rstrip(':')}"


def _policy(site: Path) -> str:
    """Return the policy under which all pages work, which names by hashes their scripts and the search's style."""
    scripts = {script for page in site.rglob("*.html") for script in INLINE_SCRIPT.findall(page.read_text())}
    bundle = next(site.glob("assets/javascripts/bundle.*.js")).read_text()
    variable = re.findall(r'"style",\{\},(\w+)\.toString\(\)', bundle)
    styles = re.findall(rf"\b{variable[0]}='([^'\\]+)'", bundle) if len(variable) == 1 else []
    if len(styles) != 1:
        sys.exit("This Zensical's search brings its style in another way: see how _policy can find it")
    return (
        f"default-src 'none'; script-src 'self' {_hashes(scripts)}; style-src 'self' {_hashes(styles)}; "
        "img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _hashes(texts: Iterable[str]) -> str:
    return " ".join(sorted(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
