"""The documents name only what exists: paths, links, make targets, commands, settings."""

import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from pydantic import AliasChoices
from typer.core import TyperGroup
from typer.main import get_command

from deployments.local import app
from serve_app.settings import Settings
from tests.support import ROOT

TOP_LEVEL = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "models/pocket/README.md",
    "configs/helm/atelier/README.md",
)
DOCUMENTS = [*(ROOT / name for name in TOP_LEVEL), *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = ROOT / "docs" / "contribute" / "decisions"
FOLDERS = ("serve_app", "deployments", "tests", "docs", "configs", "models", "benchmarks", "notebooks")
PATH = re.compile(rf"(?<![\w./…-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
ENVIRONMENT = re.compile(r"\bATELIER_[A-Z_]+[A-Z]\b")
COMMAND = re.compile(r"(?:^ *|`|-- |bin/|&& |\| )atelier ((?:[a-z][a-z-]+)(?: [a-z][a-z-]+)?)", re.MULTILINE)
"""`atelier` where a command begins; elsewhere it is the name of a chart's release, a service or a namespace."""

_atelier = cache(get_command)


def _wrong(found: Callable[[str], Iterable[str]]) -> dict[str, list[str]]:
    """By document: what `found` finds in its text."""
    by_document = {str(path.relative_to(ROOT)): sorted(set(found(path.read_text()))) for path in DOCUMENTS}
    return {document: names for document, names in by_document.items() if names}


def test_every_path_exists() -> None:
    exists = cache(lambda path: any(ROOT.glob(path.rstrip("/"))))
    assert _wrong(lambda text: [path for path in PATH.findall(text) if not exists(path)]) == {}


def test_every_link_leads_somewhere() -> None:
    broken = {
        document: [link for link in LINK.findall(document.read_text()) if not _leads_somewhere(document, link)]
        for document in DOCUMENTS
    }
    assert {document: links for document, links in broken.items() if links} == {}


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.compile(r"(?:`|^)make ([a-z-]+)", flags=re.MULTILINE)
    assert _wrong(lambda text: set(named.findall(text)) - targets) == {}


def test_every_environment_variable_is_read() -> None:
    assert _wrong(lambda text: set(ENVIRONMENT.findall(text)) - _environment_variables()) == {}


def test_every_command_exists() -> None:
    code = re.compile(r"```sh\n.*?```|`[^`\n]+`", flags=re.DOTALL)
    assert _wrong(lambda text: unknown_commands("\n".join(code.findall(text)))) == {}


def test_operations_explain_every_setting() -> None:
    text = (ROOT / "docs" / "operate" / "settings.md").read_text()
    assert not [name for name in _settings() if f"`{name}`" not in text]


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "understand" / "architecture.md").read_text()
    packages = {
        path.parent.relative_to(ROOT)
        for name in ("serve_app", "deployments")
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert not [str(package) for package in sorted(packages) if f"`{package}/" not in text]


def test_the_index_of_decisions_lists_every_page_and_every_old_number() -> None:
    index = (DECISIONS / "README.md").read_text()
    entries = dict(re.findall(r"^- \[.*\]\((.*)\):[^(]*\(([^)]*)\)", index, flags=re.MULTILINE))
    assert set(entries) == {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}
    assert {int(number) for numbers in entries.values() for number in numbers.split(",")} == set(range(1, 65))


def test_decisions_are_named_by_their_pages() -> None:
    """In code as in documents: the numbers that they had are explained by the index alone."""
    texts = {path: path.read_text(errors="ignore") for path in _tracked(*FOLDERS, *TOP_LEVEL) if path != Path(__file__)}
    del texts[DECISIONS / "README.md"]
    numbered = [str(path) for path, text in texts.items() if re.search(r"(?i)\bdecisions?[\s#]+[0-9]", text)]
    pages = {page for text in texts.values() for page in re.findall(r"\bdecisions/([\w-]+\.md)", text)}
    assert (numbered, [page for page in pages if not (DECISIONS / page).exists()]) == ([], [])


def _leads_somewhere(document: Path, link: str) -> bool:
    place, _, anchor = link.partition("#")
    target = (document.parent / place).resolve() if place else document
    if not target.exists():
        return False
    return not anchor or anchor in _anchors(target)


@cache
def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _settings() -> set[str]:
    """Each by the first of its names."""
    return {
        str(field.validation_alias.choices[0])
        if isinstance(field.validation_alias, AliasChoices)
        else f"ATELIER_{name.upper()}"
        for name, field in Settings.model_fields.items()
    }


@cache
def _environment_variables() -> frozenset[str]:
    """Settings, and what the code, the configurations, the tests and the notebook read besides them."""
    files = _tracked("serve_app", "deployments", "configs", "tests", "notebooks")
    texts = (path.read_text(errors="ignore") for path in files if path != Path(__file__))
    return frozenset({name for text in texts for name in ENVIRONMENT.findall(text)} | _settings())


def _tracked(*places: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def unknown_commands(code: str) -> list[str]:
    """The words behind `atelier` that are no command of it."""
    return [words for words in COMMAND.findall(code) if not _is_command(words.split())]


def _is_command(words: list[str]) -> bool:
    command = _atelier(app)
    for word in words:
        if not isinstance(command, TyperGroup):
            return True  # what follows a command is its own
        if word not in command.commands:
            return False
        command = command.commands[word]
    return True
