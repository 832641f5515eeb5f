"""The two documents and their pages: valid, closed, exact, with examples that work, and nothing loaded from elsewhere."""

import html
import json
import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openapi_spec_validator import validate

from serve_app.api.openapi import span_text
from serve_app.domain.requests import Variant
from tests.api.house import House, Member

A, B = Variant.A, Variant.B
NAMES = ("a", "b", "jobs")
PROMPTS = {A: "prompt", B: "positive_prompt"}
LONGEST = "x" * 4000
RATE = {
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "RateLimit-Policy",
    "RateLimit",
    "X-Request-Id",
}


async def document_of(house: House, name: str) -> dict[str, Any]:
    answer = await house.client.get(f"/openapi/{name}.json")
    assert answer.status_code == 200
    return answer.json()


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from nodes(child)
    elif isinstance(value, list):
        for child in value:
            yield from nodes(child)


def resolve(document: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in row:
        target: Any = document
        for part in row["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        row = target
    return row


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize("name", NAMES)
async def test_a_document_is_valid_openapi_3_1(house: House, name: str) -> None:
    document = await document_of(house, name)
    assert document["openapi"].startswith("3.1")
    validate(document)  # pyright: ignore[reportArgumentType]
    assert document["servers"] == [{"url": "http://house.test"}]


@pytest.mark.parametrize("name", NAMES)
async def test_every_object_in_a_document_is_closed(house: House, name: str) -> None:
    objects = [node for node in nodes(await document_of(house, name)) if node.get("type") == "object"]
    assert objects
    assert all(node["additionalProperties"] is False for node in objects)


@pytest.mark.parametrize("name", NAMES)
async def test_every_answer_documents_every_header(house: House, name: str) -> None:
    document = await document_of(house, name)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, row in operation["responses"].items():
                headers = set(resolve(document, row)["headers"])
                assert headers >= RATE, (path, status)
                assert ("WWW-Authenticate" in headers) == (status == "401")
                assert status not in ("429", "503", "202") or "Retry-After" in headers


@pytest.mark.parametrize("name", NAMES)
async def test_every_example_matches_its_schema(house: House, name: str) -> None:
    document = await document_of(house, name)
    checked = 0
    for node in nodes(document):
        for example in node.get("examples", {}).values() if "schema" in node else ():
            validator(document, node["schema"]).validate(example["value"])
            checked += 1
    assert checked > 10


OPERATIONS = {
    "a": {
        ("post", "/v1/generate"): {"202", "400", "401", "403", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/generate/{request_id}"): {"200", "401", "404", "500", "503"},
        ("post", "/v1/upscale"): {"202", "400", "401", "404", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/upscale/{request_id}"): {"200", "401", "404", "500", "503"},
    },
    "b": {
        ("post", "/v1/generate"): {"200", "400", "401", "403", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/generations/{run_id}"): {"200", "401", "404", "500", "503"},
        ("get", "/v1/models"): {"200", "401", "429", "500", "503"},
    },
}


async def test_a_document_tells_this_installation_s_plans_and_retention(house: House) -> None:
    text = (await document_of(house, "a"))["info"]["description"]
    assert "Basic 50 per hour, Professional 200 per hour, Enterprise 1000 per hour" in text
    assert "without the key for 24 hours" in text
    assert "kept for 30 days" in text
    assert (
        "Free 10 per minute, Basic 30 per minute, Premium 100 per minute"
        in (await document_of(house, "b"))["info"]["description"]
    )


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(days=30), "30 days"),
        (timedelta(hours=24), "24 hours"),
        (timedelta(hours=1), "1 hour"),
        (timedelta(minutes=1), "1 minute"),
        (timedelta(minutes=90), "90 minutes"),
        (timedelta(seconds=2.5), "2.5 seconds"),
    ],
)
def test_a_span_is_told_in_its_largest_unit(span: timedelta, text: str) -> None:
    assert span_text(span) == text


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_document_names_its_own_operations_and_their_statuses(house: House, name: str) -> None:
    document = await document_of(house, name)
    found = {
        (method, path): set(operation["responses"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert found == OPERATIONS[name]


async def test_each_document_names_its_own_credential(house: House) -> None:
    a, b = await document_of(house, "a"), await document_of(house, "b")
    assert list(a["components"]["securitySchemes"].values()) == [{"type": "http", "scheme": "bearer"}]
    assert list(b["components"]["securitySchemes"].values()) == [
        {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    ]


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize(
    "text",
    ["x", LONGEST, " \n" + LONGEST + "\t\u3000", "", " ", "\u3000\u2028", LONGEST + "x", "\x1c", "a\nb"],
    ids=lambda text: ascii(text[:4]),
)
async def test_the_document_and_the_service_agree_on_prompts(
    house: House, regular: Member, variant: Variant, text: str
) -> None:
    document = await document_of(house, variant)
    body = {**_shortest(document), PROMPTS[variant]: text}
    schema = document["components"]["schemas"]["GenerationRequest"]
    answer = await house.client.post("/v1/generate", json=body, headers=regular.headers(variant))
    assert validator(document, schema).is_valid(body) == (answer.status_code != 400), answer.text


@pytest.mark.parametrize("variant", Variant)
async def test_the_examples_of_generation_work_as_they_stand(house: House, regular: Member, variant: Variant) -> None:
    document = await document_of(house, variant)
    content = document["paths"]["/v1/generate"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        answer = await house.client.post("/v1/generate", json=example["value"], headers=regular.headers(variant))
        assert answer.status_code in (200, 202), answer.text


def _shortest(document: dict[str, Any]) -> dict[str, Any]:
    content = document["paths"]["/v1/generate"]["post"]["requestBody"]["content"]["application/json"]
    return content["examples"]["Shortest"]["value"]


@pytest.mark.parametrize("variant", Variant)
async def test_real_answers_of_every_state_match_the_document(house: House, member: Member, variant: Variant) -> None:
    document = await document_of(house, variant)
    schema = validator(document, {"$ref": f"#/components/schemas/{'StatusRecord' if variant is A else 'Run'}"})
    path = "/v1/generate/" if variant is A else "/v1/generations/"

    async def check(job_id: str, status: str) -> None:
        body = (await house.client.get(path + job_id, headers=member.headers(variant))).json()
        assert body["status"] == status
        schema.validate(body)

    job_id = await house.submit(member, variant)
    await check(job_id, "processing" if variant is A else "queued")
    await house.run(job_id, 50)
    await check(job_id, "processing")
    await house.complete(job_id)
    await check(job_id, "completed")
    canceled = await house.submit(member, variant)
    await house.resources.jobs.cancel(canceled, account_id=member.account.id)
    await check(canceled, "failed")


async def test_real_jobs_match_their_document(house: House, member: Member) -> None:
    document = await document_of(house, "jobs")
    schema = validator(document, {"$ref": "#/components/schemas/Jobs"})
    done = await house.submit(member, num_images=2)
    await house.complete(done)
    await house.submit(member, B)
    schema.validate((await house.client.get("/v1/jobs?limit=2", headers=member.a)).json())


async def page_of(house: House, path: str) -> httpx.Response:
    answer = await house.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer


@pytest.mark.parametrize("path", ["/", "/docs/a", "/docs/b", "/docs/jobs"])
async def test_a_page_loads_nothing_from_elsewhere(house: House, path: str) -> None:
    answer = await page_of(house, path)
    for target in re.findall(r'(?:href|src|action|srcset|poster|data)="([^"]*)"', answer.text):
        assert target.startswith(("/", "#")), target
        assert not target.startswith("//")
    assert "<script" not in answer.text
    assert "style=" not in answer.text
    assert "@import" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    style = await house.client.get("/docs/style.css")
    assert style.headers["content-type"].startswith("text/css")
    assert "url(" not in style.text
    assert "@import" not in style.text


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_page_names_every_operation_field_and_error(house: House, name: str) -> None:
    document, text = await document_of(house, name), html.unescape((await page_of(house, f"/docs/{name}")).text)
    for path in document["paths"]:
        assert path in text
    for field in document["components"]["schemas"]["GenerationRequest"]["properties"]:
        assert f"<code>{field}</code>" in text
    for row in document["components"]["responses"].values():
        for code in row["content"]["application/json"]["examples"]:
            assert code in text or code == "ambiguous_credentials"


@pytest.mark.parametrize("variant", Variant)
async def test_the_curl_lines_of_a_page_work_when_pasted(house: House, member: Member, variant: Variant) -> None:
    """Read as a shell reads them, then sent."""
    page = await page_of(house, f"/docs/{variant}")
    lines = [html.unescape(text) for text in re.findall(r"<pre>(curl .*?)</pre>", page.text, re.DOTALL)]
    assert len(lines) == (5 if variant is A else 4)
    job = await house.complete(await house.submit(member, variant))
    known = {"$ATELIER_KEY": member.key, "$REQUEST_ID": job.id, "$RUN_ID": job.id}
    for line in lines:
        for name, value in known.items():
            line = line.replace(name, value)
        answer = await _send(house, shlex.split(line.replace("\\\n", " ")))
        if "/v1/upscale" in line and "POST" in line:  # the example's image is nobody's
            assert answer.status_code == 404
        else:
            assert answer.status_code in (200, 202), (line, answer.text)


async def _send(house: House, words: list[str]) -> httpx.Response:
    assert words[:2] == ["curl", "-s"]
    method, body, headers, url = "GET", None, dict[str, str](), ""
    rest = iter(words[2:])
    for word in rest:
        match word:
            case "-X":
                method = next(rest)
            case "-H":
                name, value = next(rest).split(": ")
                headers[name] = value
            case "-d":
                body = next(rest)
                json.loads(body)
            case _:
                assert not url
                url = word
    return await house.client.request(method, url, headers=headers, content=body)
