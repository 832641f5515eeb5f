"""The project uses the terms of its field, and docstrings begin with a short sentence.

Retired private words occur nowhere but in the list of them here.
"""

import ast
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
        "stranger strangers refusal refusals voucher vouchers grains skeleton skeletons"
    )
)
"""As whole words and as parts of identifiers: `free_rooms`, `GenerationBench`, `test_door.py`."""
RETIRED_PHRASE = re.compile(r"hand(ed|s|ing)?[ _-]?back|signs? of life|\w+_words\.py", re.IGNORECASE)
ALLOWED = {
    "models/*": {"house", "houses", "roof", "edge"},  # words of the pocket model's pictures and drawings
    "tests/models/*": {"house"},
    "configs/*": {"verbs", "edge", "wire"},  # Kubernetes: verbs of a role, the network's edge, WireGuard
    "SECURITY.md": {"wire"},  # WireGuard
    "docs/operations/*": {"wire"},
    "docs/deploy-kubernetes.md": {"edge"},
    "tests/manifests/*": {"edge"},
    "serve_app/cli/*": {"edge"},  # rich: `pad_edge`
}
IGNORED = ("tests/test_words.py", "serve_app/web/docs/static/*", "serve_app/web/site/static/htmx/*")
"""This list and vendored libraries."""
DOCUMENTED = ("serve_app", "deployments", "benchmarks", "models", "tests", "configs", "docs")
FIRST_LINE = 100
"""Characters of a docstring's first line at most."""
LONG_QUOTED_LINE = re.compile(
    rf'(?:\A(?:#.*\n)*|:(?: *#.*)?\n) *r?"""(?:\n *)?(?!.{{0,{FIRST_LINE}}}""").{{{FIRST_LINE + 1}}}'
)
"""Code without such a line after a colon is not parsed, which would take 1 s of processor time for the whole project."""


def test_no_retired_word_occurs() -> None:
    assert list(_offences()) == []


def test_words_inside_names_are_found() -> None:
    assert _retired("GenerationBench no_room HandedBack TELLER") == ["bench", "room", "teller", "HandedBack"]
    assert _retired("benchmark headroom math.floor hand-written") == []


def test_docstrings_begin_with_a_line_of_at_most_100_characters() -> None:
    assert list(_long_first_lines()) == []


def test_the_first_line_of_every_kind_of_docstring_is_measured() -> None:
    long = "x" * (FIRST_LINE + 1)
    code = f'"""{long}"""\nclass A:\n    """{long}\n\n    Rest."""\n    async def b(self):\n        """{long}"""\n'
    assert [line for line, text in _first_lines(code) if len(text) > FIRST_LINE] == [1, 3, 7]
    assert LONG_QUOTED_LINE.search(code)
    assert list(_first_lines(f'"""Short.\n\n{long}\n"""\nx = """{long}"""\n')) == [(1, "Short.")]


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


def _long_first_lines() -> Iterator[str]:
    for folder in DOCUMENTED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            code = path.read_text()
            for number, text in _first_lines(code) if LONG_QUOTED_LINE.search(code) else ():
                if len(text) > FIRST_LINE:
                    yield f"{path.relative_to(ROOT)}:{number}: {len(text)} characters: {text}"


def _first_lines(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the first line of each docstring of a module, class or function."""
    for node in ast.walk(ast.parse(code)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.partition("\n")[0]


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
