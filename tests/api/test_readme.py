"""The curl lines of the README and of the guide to the interfaces work and return what is shown there."""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

import httpx
import yaml

from tests.api.app import LORA, Member, TestService, send_curl
from tests.support import ROOT, adapter_id


@dataclass(frozen=True, slots=True)
class Shown:
    """A curl line, and the comment below it: the answer, shortened here and there."""

    line: str
    answer: str

    @property
    def status(self) -> int:
        return int(self.answer[:3]) if self.answer[:3].isdecimal() else 200

    @property
    def words(self) -> set[str]:
        """Return every field name that the answer shows."""
        return set(re.findall(r'"(\w+)":', self.answer))


async def test_the_curl_lines_work_and_answer_as_shown(service: TestService, member: Member) -> None:
    catalog = yaml.safe_load((ROOT / "configs" / "catalog.yaml").read_text())
    offered = (LORA, adapter_id("neon"))
    ids = {adapter["id"]: offered[place % 2] for place, adapter in enumerate(catalog["adapters"])}
    for shown in _shown():
        for name in ("gen_…", "job_…"):
            if name in shown.line:
                ids["img_…"] = (await service.complete(ids[name])).images[0].image_id
        answer = await _send(service.client, member, _with(ids, shown.line))
        assert answer.status_code == shown.status, answer.text
        names = _names(answer.json())
        assert shown.words <= names if ", …}" in shown.answer else shown.words == names, shown.line
        if "/v1/jobs" in shown.line:
            ids["job_…"] = answer.json()["id"]
        ids["gen_…"] = answer.json().get("request_id") or answer.json().get("run_id") or ids.get("gen_…", "")


def _shown() -> list[Shown]:
    pages = ("index", "interface-a", "interface-b", "jobs")
    documents = (
        ROOT / "README.md",
        *(ROOT / "docs" / "integrate" / f"{page}.md" for page in pages),
        ROOT / "docs" / "draw" / "pictures.md",
    )
    text = "".join(document.read_text() for document in documents).replace("\\\n", "")
    pairs = re.findall(r"^(curl -s [^#]*)\n((?:# .*\n)+)", text, flags=re.MULTILINE)
    assert len(pairs) == text.count("curl -s") == 14
    return [Shown(line, answer.removeprefix("# ")) for line, answer in pairs]


def _with(ids: dict[str, str], line: str) -> str:
    for shown, meant in ids.items():
        line = line.replace(shown, meant)
    assert "…" not in line
    return line


async def _send(client: httpx.AsyncClient, member: Member, line: str) -> httpx.Response:
    shell = {"$ATELIER_URL": "", "$ATELIER_KEY": member.key, "$JSON": "Content-Type: application/json"}
    return await send_curl(client, [_with_variables(word, shell) for word in shlex.split(line)])


def _with_variables(word: str, shell: dict[str, str]) -> str:
    for name, value in shell.items():
        word = word.replace(name, value)
    return word


def _names(value: Any) -> set[str]:
    return set(re.findall(r'"(\w+)":', json.dumps(value)))
