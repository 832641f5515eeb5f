"""The project speaks in the terms of its field: retired private words occur nowhere but in the changelog."""

import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase

from tests.support import ROOT

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
RETIRED = frozenset(
    WORD.findall(
        "house houses floors roof roofs door doors verbs mains garden gardens visitor visitors room rooms desk desks bench "
        "benches teller telling told gate gates shelf shelves forge rig rigs books wire hands patiently pace edge "
        "stranger strangers refusal refusals"
    )
)
"""As whole words and as parts of identifiers: `free_rooms`, `GenerationBench`, `test_door.py`."""
RETIRED_PHRASE = re.compile(r"hand(ed|s|ing)?[ _-]?back|signs? of life|\w+_words\.py", re.IGNORECASE)
ALLOWED = {
    "models/*": {"house", "houses", "roof", "edge"},  # words of the pocket model's pictures and drawings
    "tests/models/*": {"house"},
    "configs/*": {"verbs", "edge", "wire"},  # Kubernetes: verbs of a role, the network's edge, WireGuard
    "SECURITY.md": {"wire"},  # WireGuard
    "docs/operations.md": {"wire"},
    "docs/deploy-kubernetes.md": {"edge"},
    "tests/manifests/*": {"edge"},
    "serve_app/cli/*": {"edge"},  # rich: `pad_edge`
}
IGNORED = ("CHANGELOG.md", "tests/test_words.py", "serve_app/api/docs/static/*", "serve_app/api/site/static/htmx/*")
"""The history, this list, and vendored libraries."""


def test_no_retired_word_occurs() -> None:
    assert list(_offences()) == []


def test_words_inside_names_are_found() -> None:
    assert _retired("GenerationBench no_room HandedBack TELLER") == ["bench", "room", "teller", "HandedBack"]
    assert _retired("benchmark headroom math.floor hand-written") == []


def _offences() -> Iterator[str]:
    for name in _files():
        allowed = {word for pattern, words in ALLOWED.items() if fnmatchcase(name, pattern) for word in words}
        try:
            lines = (ROOT / name).read_text().splitlines()
        except UnicodeDecodeError:
            lines = []
        for place, text in (("its name", name), *enumerate(lines, start=1)):
            if found := [word for word in _retired(text) if word not in allowed]:
                yield f"{name}:{place}: {', '.join(found)}"


def _files() -> list[str]:
    """What is under version control or would be; the files that git ignores are not ours."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else _files_without_git()
    return [
        name for name in names if (ROOT / name).is_file() and not any(fnmatchcase(name, pattern) for pattern in IGNORED)
    ]


def _files_without_git() -> list[str]:
    """In an unpacked archive of the project."""
    folders = ("benchmarks", "configs", "deployments", "docs", "models", "notebooks", "serve_app", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return [str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts]


def _retired(text: str) -> list[str]:
    words = [word.lower() for word in WORD.findall(text)]
    return [word for word in words if word in RETIRED] + [found[0] for found in RETIRED_PHRASE.finditer(text)]
