"""Where `Client()` finds the service and a key, and that it needs no package but httpx."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from serve_app.client import AsyncClient, Client
from serve_app.client.commands import is_of_account
from tests.live import Live
from tests.support import ROOT, adapter_id


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment that names no service."""
    for name in ("ATELIER_URL", "ATELIER_BASE_URL", "ATELIER_KEY", "ATELIER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write_ready_file(folder: Path, base_url: str, **keys: str) -> Path:
    folder.mkdir()
    file = folder / "local.json"
    file.write_text(json.dumps({"base_url": base_url, "keys": keys}))
    return file


@pytest.mark.parametrize("place", ["ATELIER_URL", "ATELIER_BASE_URL", "var", "data", "given"])
async def test_the_environment_or_the_local_services_file_names_the_service_and_the_key(
    live: Live, key: str, place: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.isupper():
        monkeypatch.setenv(place, live.base_url)
        monkeypatch.setenv("ATELIER_KEY", key)
    file = None if place.isupper() else write_ready_file(elsewhere / place, live.base_url, both=key)
    if place == "data":
        monkeypatch.setenv("ATELIER_DATA_DIR", place)
    async with AsyncClient(ready_file=file if place == "given" else None) as client:
        assert await client.base_models()


def test_the_key_is_the_one_of_the_interface(elsewhere: Path) -> None:
    write_ready_file(elsewhere / "var", "http://service.test", a="atl_a", b="atl_b")
    assert [Client(interface=each).service.key for each in ("a", "b")] == ["atl_a", "atl_b"]
    assert Client(key="atl_mine").service.key == "atl_mine"
    assert Client("http://service.test/").service.key == "atl_a"


def test_the_local_services_key_is_not_sent_to_another_address(elsewhere: Path) -> None:
    write_ready_file(elsewhere / "var", "http://service.test", both="atl_local")
    with pytest.raises(ValueError, match=r"^key: .*not sent to another address") as refused:
        Client("http://evil.test")
    assert "atl_local" not in str(refused.value)


def test_what_is_missing_is_named_with_where_it_was_looked_for(elsewhere: Path) -> None:
    file = re.escape(str(elsewhere / "var" / "local.json"))
    with pytest.raises(ValueError, match=rf"^base_url: give it, or set ATELIER_URL: there is no {file}"):
        Client()
    with pytest.raises(ValueError, match=r"^key: give it, or set ATELIER_KEY: "):
        Client("http://service.test")
    write_ready_file(elsewhere / "var", "http://service.test")
    with pytest.raises(ValueError, match=rf"^{file}: KeyError"):
        Client()


BASE_INSTALL = """
import importlib.abc, sys
allowed = {allowed!r}

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
{program}
"""


def run_in_base_install(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import nothing but httpx, what that needs, and this repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, packages = [*project["dependencies"]], set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        is_for_us = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_for_us and requirement.name not in packages:
            packages.add(requirement.name)
            wanted += metadata.requires(requirement.name) or ()
    assert project["dependencies"] == ["httpx"]
    assert len(packages) < 10
    modules = {name for name, owners in metadata.packages_distributions().items() if packages & {*owners}}
    code = BASE_INSTALL.format(allowed=modules | {"serve_app", "deployments"}, program=program)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_base_install_draws_saves_and_shows(live: Live, key: str, elsewhere: Path) -> None:
    write_ready_file(elsewhere / "var", live.base_url, both=key)
    done = run_in_base_install(f"""
from pathlib import Path
from zipfile import ZipFile
from serve_app.client.commands import is_of_account
from serve_app.client import Client
from serve_app.client.upload import upload_progress
client = Client(ready_file={str(elsewhere / "var" / "local.json")!r})
job = client.generate("a boat", loras={{"neon": 0.8}}, seed=7)
job.images[0].upscale().save({str(elsewhere / "x.png")!r})
assert "seed 7" in job._repr_html_()
with upload_progress("ink", None, shows_bar=True) as sent:
    sent(1, 2)
assert {{name for name in sys.modules if name.startswith("serve_app.")}} == {{
    name for name in sys.modules if name.startswith("serve_app.client")
}}
try:
    job.images[0].pil()
except ModuleNotFoundError as error:
    assert (error.name, "pip install pillow" in str(error)) == ("PIL", True)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert (elsewhere / "x.png").read_bytes().startswith(b"\x89PNG")


PICTURE = ROOT / "docs" / "images" / "compare.webp"
COMMANDS = """
import json, os
from deployments.__main__ import main
os.environ["PATH"] = ""  # so that no program is found that would open an image
for words in json.loads({words!r}):
    sys.argv = ["atelier", *words]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""


@pytest.mark.slow
def test_the_command_of_a_base_install_draws_and_lists_and_names_what_else_to_install(
    live: Live, key: str, elsewhere: Path
) -> None:
    there, file, two = ["--url", live.base_url, "--key", key], str(elsewhere / "x.jpg"), str(elsewhere / "z.png")
    live.outcome = "leave"
    with Client(live.base_url, key) as client:
        waiting = client.upscale(PICTURE).id
    live.outcome = "complete"
    calls = [
        ["generate", "a\nboat " * 20, "--lora", "neon=0.8", "--out", file, *there],
        ["loras", "list", "--search", "outli", *there],
        ["jobs", "list", "--limit", "3", *there],
        ["jobs", "list", "--limit", "0", *there],
        ["mcp", "--help"],
        ["jobs", "cancel", waiting, *there],
        ["jobs", "cancel", waiting, "--json", *there],
        ["upscale", file, "--out", str(elsewhere / "y.webp"), *there],
        ["generate", "a boat", "--num-images", "2", "--open", "--out", two, *there],
        ["generate", "--help"],
        ["jobs"],
        [],
        ["up"],
        ["jobs", "show", waiting],
    ]
    done = run_in_base_install(COMMANDS.format(words=json.dumps(calls)))
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert ends == [f"ended with {code}" for code in (0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2)], done.stderr
    drawn, loras, jobs, _, _, canceled, again, enlarged, opened, usage, *_ = re.split(r"ended with \d\n", done.stdout)
    assert (drawn[: len(file)], Path(file).read_bytes()[:3]) == (file, b"\xff\xd8\xff")
    assert "y.webp  img_" in enlarged
    assert [line.split()[0] for line in opened.splitlines()] == [two.replace("z.", f"z-{index}.") for index in (1, 2)]
    assert "atelier: --limit: must be at least 1\n" in done.stderr
    assert "atelier: --open: this machine has no program that opens the images\n" in done.stderr
    assert [line.split()[:2] for line in loras.splitlines()] == [["NAME", "ID"], ["Outline", adapter_id("outline")]]
    rows = jobs.splitlines()
    assert [row.split()[1] for row in rows] == ["STATUS", "completed", "queued"]
    assert rows[1].endswith(("a boat " * 20)[:60].strip())
    assert canceled == f"{waiting}: canceled\n"
    assert json.loads(again)["status"] == "canceled"
    assert "Read (red:1.5) and [green] in prompts" in " ".join(usage.split())
    for name, said in zip(("up", "show"), done.stderr.splitlines()[-2:], strict=True):
        assert f"not {name}: for the service" in said
        assert "pip install '.[server]'" in said


def test_with_the_services_packages_a_listing_is_an_accounts_where_an_address_is_given() -> None:
    calls = {"jobs list": False, "jobs list --url=x": True, "loras list --key x": True, "loras add --url x": False}
    assert {words: is_of_account(words.split()) for words in calls} == calls
    assert is_of_account(["generate"])
    assert not is_of_account(["accounts", "list"])


@pytest.mark.slow
def test_a_build_ships_no_module_that_an_earlier_one_left_behind(tmp_path: Path) -> None:
    checkout, wheels = tmp_path / "checkout", tmp_path / "wheels"
    shutil.copytree(ROOT / "serve_app" / "client", checkout / "serve_app" / "client")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, checkout)
    stale = checkout / "build" / "lib" / "serve_app" / "client" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    guide = checkout / "serve_app" / "web" / "guide" / "site" / "assets" / "fonts" / "a.woff2"
    guide.parent.mkdir(parents=True)
    guide.touch()
    alone = ("--no-build-isolation", "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *alone, "--wheel-dir", wheels, checkout], check=True)
    (wheel,) = wheels.iterdir()
    names = ZipFile(wheel).namelist()
    assert str(guide.relative_to(checkout)) in names, "the guide is shipped where it was built"
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {f"serve_app/client/{file.name}" for file in (ROOT / "serve_app" / "client").glob("*.py")}
    assert [file.name for file in (checkout / "build").rglob("*.py")] == ["gone.py"], "nothing more is left there"
