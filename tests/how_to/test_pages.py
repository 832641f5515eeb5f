"""What the pages of docs/contribute say works: all are followed on one copy of the tree, whose tests then pass."""

from pathlib import Path

import pytest

from tests.how_to.pages import copy_of_the_tree, follow, run

PAGES = ("add-a-family", "add-a-sampler", "add-a-metric", "add-a-command", "add-a-field")
FIELDS_FILES = 6
"""A field of `POST /v1/jobs` touches at most this many files beside pages, commands and documents."""
TESTS = (
    "tests/how_to/followed.py",
    "tests/operations/test_metrics.py::test_waits_ends_and_failures_are_counted_by_the_scripts_once",
    "tests/manifests/test_monitoring.py::test_the_dashboard_shows_every_metric",
    "tests/manifests/test_monitoring.py::test_the_documents_have_every_metric",
    "tests/cli/test_accounts.py::test_an_account_is_created_listed_and_moved_to_other_plans",
)
"""What the pages lead to, and the tests that they change or name."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_pages_add_works(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    changed_by = {page: follow(page, tree) for page in PAGES}
    changed = [name for names in changed_by.values() for name in names]
    assert len(set(changed)) == len(changed), "a page needs none of the others"
    assert len(changed_by["add-a-field"]) <= FIELDS_FILES
    python = sorted(name for name in changed if name.endswith(".py"))
    run(["ruff", "check", "--quiet", *python], tree)
    run(["ruff", "format", "--quiet", "--check", *python], tree)
    run(["lint-imports"], tree)
    run(["python", "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *TESTS], tree)
