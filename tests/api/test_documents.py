"""The documents are valid and exact, their examples work, and pages load nothing from elsewhere."""

import hashlib
import html
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import redis
from openapi_spec_validator import validate

from serve_app.domain.requests import Variant
from serve_app.loras.catalog import CatalogReader
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.web.docs.reference import kind_of
from serve_app.web.site import PAGE_HEADERS
from tests.api.app import CURL_FILE, PROMPT_FIELD, Member, TestService, error_of, refused, send_curl
from tests.attack.raw import RATE_HEADERS
from tests.composition import Resources
from tests.support import adapter_of

A, B = Variant.A, Variant.B
NAMES = ("a", "b", "jobs", "loras")
LONGEST = "x" * 4000


async def document_of(service: TestService, name: str) -> dict[str, Any]:
    answer = await service.client.get(f"/openapi/{name}.json")
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


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]


def resolve(document: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in row:
        target: Any = document
        for part in row["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        row = target
    return row


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_document_is_valid_openapi_3_1(service: TestService, name: str) -> None:
    document = await document_of(service, name)
    assert document["openapi"].startswith("3.1")
    validate(document)  # pyright: ignore[reportArgumentType]
    assert document["servers"] == [{"url": "http://service.test"}]


@pytest.mark.parametrize("name", NAMES)
async def test_every_object_in_a_document_is_closed(service: TestService, name: str) -> None:
    objects = [node for node in nodes(await document_of(service, name)) if node.get("type") == "object"]
    assert objects
    maps = [node for node in objects if "properties" not in node]
    assert all(node["additionalProperties"]["type"] == "string" for node in maps)
    assert all(node["additionalProperties"] is False for node in objects if node not in maps)


@pytest.mark.parametrize("name", NAMES)
async def test_every_answer_documents_every_header_and_all_errors_one_schema(service: TestService, name: str) -> None:
    document, errors = await document_of(service, name), 0
    for operation in operations(document):
        for status, row in operation["responses"].items():
            headers = set(resolve(document, row)["headers"])
            assert {name.lower() for name in headers} >= set(RATE_HEADERS), (operation["operationId"], status)
            assert ("WWW-Authenticate" in headers) == (status == "401")
            assert status not in ("429", "503", "202") or "Retry-After" in headers
            if status >= "400":
                content = row["content"]["application/json"]
                assert content["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
                assert content["examples"]
                errors += 1
    assert errors > 10


@pytest.mark.parametrize("name", NAMES)
async def test_every_example_matches_its_schema(service: TestService, name: str) -> None:
    document = await document_of(service, name)
    checked = 0
    for node in nodes(document):
        for example in node.get("examples", {}).values() if "schema" in node else ():
            validator(document, node["schema"]).validate(example["value"])
            checked += 1
    assert checked > 10


OPERATIONS = {
    "a": {
        ("post", "/v1/generate"): {"202", "400", "401", "403", "408", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/generate/{request_id}"): {"200", "304", "401", "403", "404", "500", "503"},
        ("post", "/v1/upscale"): {"202", "400", "401", "403", "404", "408", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/upscale/{request_id}"): {"200", "304", "401", "403", "404", "500", "503"},
    },
    "b": {
        ("post", "/v1/generate"): {"200", "400", "401", "403", "408", "409", "413", "415", "429", "500", "503"},
        ("get", "/v1/generations/{run_id}"): {"200", "304", "401", "403", "404", "500", "503"},
        ("get", "/v1/models"): {"200", "401", "403", "429", "500", "503"},
    },
}


async def test_a_document_states_this_installation_s_plans_and_retention(service: TestService) -> None:
    text = (await document_of(service, "a"))["info"]["description"]
    assert "Basic 50 per hour, Professional 200 per hour, Enterprise 1000 per hour" in text
    assert "without the key for 24 hours" in text
    assert "kept for 30 days" in text
    assert (
        "Free 10 per minute, Basic 30 per minute, Premium 100 per minute"
        in (await document_of(service, "b"))["info"]["description"]
    )


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_document_names_its_own_operations_and_their_statuses(service: TestService, name: str) -> None:
    document = await document_of(service, name)
    found = {
        (method, path): set(operation["responses"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert found == OPERATIONS[name]


async def test_each_document_names_its_own_credential(service: TestService) -> None:
    a, b = await document_of(service, "a"), await document_of(service, "b")
    assert list(a["components"]["securitySchemes"].values()) == [{"type": "http", "scheme": "bearer"}]
    assert list(b["components"]["securitySchemes"].values()) == [
        {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    ]


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize(
    "text",
    [
        *("x", LONGEST, " \n" + LONGEST[:-4] + "\t\u3000", "\x1c", "a\nb"),
        *("", " ", "\u3000\u2028", "\x85", LONGEST + "x", "\0", "a\0", "\0a"),
    ],
    ids=lambda text: ascii(text[:4]),
)
async def test_the_document_and_the_service_agree_on_prompts(
    service: TestService, regular: Member, variant: Variant, text: str
) -> None:
    document = await document_of(service, variant)
    body = {**_shortest(document), PROMPT_FIELD[variant]: text}
    schema = document["components"]["schemas"]["GenerationRequest"]
    answer = await service.client.post("/v1/generate", json=body, headers=regular.headers(variant))
    assert validator(document, schema).is_valid(body) == (answer.status_code != 400), answer.text


@pytest.mark.parametrize("name", NAMES)
async def test_no_text_of_a_body_takes_the_character_that_the_service_refuses(service: TestService, name: str) -> None:
    document = await document_of(service, name)
    bodies = [
        content["schema"]
        for operation in operations(document)
        for content in operation.get("requestBody", {}).get("content", {}).values()
    ]
    texts = [
        node
        for body in bodies
        for node in nodes(resolve(document, body))
        if node.get("type") == "string" and node.get("format") != "binary"
    ]
    assert bool(texts) == bool(bodies)
    for text in texts:
        longest = "a" * text.get("minLength", 1)
        assert not validator(document, text).is_valid("\0" + longest[1:]), text


@pytest.mark.parametrize("fields", [{}, {"sha256": "0" * 64, "source": "s3://a/b"}])
async def test_the_document_and_the_service_agree_on_a_reference_to_weights(
    service: TestService, regular: Member, fields: dict[str, str]
) -> None:
    document = await document_of(service, "loras")
    body = {"name": "x", "base_model": "pocket", **fields}
    schema = document["paths"]["/v1/loras"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not validator(document, schema).is_valid(body)
    assert (await service.client.post("/v1/loras", json=body, headers=regular.a)).status_code == 400


def _shortest(document: dict[str, Any]) -> dict[str, Any]:
    content = document["paths"]["/v1/generate"]["post"]["requestBody"]["content"]["application/json"]
    return content["examples"]["Shortest"]["value"]


@pytest.mark.parametrize("variant", Variant)
async def test_real_answers_of_every_state_match_the_document(
    service: TestService, member: Member, variant: Variant
) -> None:
    document = await document_of(service, variant)
    schema = validator(document, {"$ref": f"#/components/schemas/{'StatusRecord' if variant is A else 'Run'}"})

    async def check(job_id: str, status: str) -> None:
        body = (await service.poll(member, variant, job_id)).json()
        assert body["status"] == status
        schema.validate(body)

    job_id = await service.submit(member, variant)
    await check(job_id, "processing" if variant is A else "queued")
    await service.run(job_id, 50)
    await check(job_id, "processing")
    await service.complete(job_id)
    await check(job_id, "completed")
    canceled = await service.submit(member, variant)
    await service.resources.queue.cancel(canceled, account_id=member.account.id)
    await check(canceled, "failed")


async def test_real_jobs_and_loras_match_their_documents(service: TestService, member: Member) -> None:
    job = await service.complete(await service.submit(member, num_images=2))
    await service.submit(member, B)
    own = await _own_lora(service, member)
    picture = (await service.client.post("/v1/images", headers=member.a, files={"file": CURL_FILE})).json()
    for document, path, name in (
        ("jobs", "/v1/jobs?limit=2", "Jobs"),
        ("jobs", "/v1/images?limit=2", "UploadedImages"),
        ("jobs", f"/v1/images/{picture['id']}", "UploadedImage"),
        ("jobs", f"/v1/images/{job.images[0].image_id}", "UploadedImage"),
        ("loras", "/v1/loras?limit=2", "Loras"),
        ("loras", f"/v1/loras/{own}", "Lora"),
    ):
        answer = await service.client.get(path, headers=member.a)
        schema = {"$ref": f"#/components/schemas/{name}"}
        validator(await document_of(service, document), schema).validate(answer.json())


async def page_of(service: TestService, path: str) -> httpx.Response:
    answer = await service.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/docs", "/docs/a", "/docs/b", "/docs/jobs"])
async def test_a_page_loads_nothing_from_elsewhere_and_nothing_inline(service: TestService, path: str) -> None:
    answer = await page_of(service, path)
    for target in re.findall(r'(?:href|src|action|srcset|poster|data|data-document)="([^"]*)"', answer.text):
        assert target.startswith(("/", "#")), target
        assert not target.startswith("//")
        assert (await service.client.get(target, follow_redirects=True)).status_code == 200, target
    for script in re.findall(r"<script[^>]*>.*?</script>", answer.text, re.DOTALL):
        assert re.fullmatch(r'<script src="(?:/docs)?/static/[\w/.-]+" defer></script>', script)
    assert "style=" not in answer.text
    assert "@import" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    style = await service.client.get("/static/site.css")
    assert style.headers["content-type"].startswith("text/css")
    assert "url(" not in style.text
    assert "@import" not in style.text


@pytest.mark.parametrize(
    "path",
    ["/docs/A", "/docs/static/x.js", "/docs/static/..%2froutes.py", "/static/..%2f__init__.py", "/openapi/x.json"],
)
async def test_there_is_no_other_document(service: TestService, path: str) -> None:
    answer = await service.client.get(path)
    refused(answer, 404, "not_found")


@pytest.mark.parametrize("path", ["/nowhere", "/docs/x", "/files/a/b/c-0.png"])
async def test_what_is_not_there_is_a_page_for_browsers_and_the_envelope_for_programs(
    service: TestService, path: str
) -> None:
    browser = await service.client.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert browser.headers["content-security-policy"]
    assert error_of(await service.client.get(path))["code"] == "not_found"
    api = await service.client.get("/v1/nowhere", headers={"Accept": "text/html"})
    assert error_of(api)["code"] == "not_found"


@pytest.mark.parametrize("name", NAMES)
async def test_the_reference_shows_each_operation_field_and_error(service: TestService, name: str) -> None:
    """The page shows them without scripts, and loads nothing from elsewhere."""
    page = await page_of(service, f"/docs/{name}")
    text = html.unescape(page.text)
    document = await document_of(service, name)
    sent = dict(zip(["to your address"], document.get("webhooks", {}).values(), strict=False))
    for path, methods in (document["paths"] | sent).items():
        for operation in methods.values():
            assert f'<section class="card operation" id="{operation["operationId"]}">' in text
            assert path in text
            for parameter in operation.get("parameters", []):
                assert f"<code>{parameter['name']}</code>" in text
            for content in operation.get("requestBody", {}).get("content", {}).values():
                body = resolve(document, content["schema"])
                for each in (body, *body.get("oneOf", ())):
                    for field in resolve(document, each).get("properties", ()):
                        assert f"<code>{field}</code>" in text
            for status, answer in () if path in sent else operation["responses"].items():
                assert f"<strong>{status}</strong>" in text or f'<span class="method">{status}</span>' in text
                assert answer["description"].replace("`", "") in text
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)
    assert page.headers["content-security-policy"] == PAGE_HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 4}, "whole number, 1 to 4"),
        ({"type": "number", "minimum": 0}, "number, at least 0"),
        ({"type": "integer", "maximum": 9}, "whole number, at most 9"),
        ({"type": "string", "maxLength": 9}, "text, up to 9 characters"),
        ({"type": "string", "format": "date-time"}, "time (ISO 8601, UTC)"),
        ({"type": "string", "const": "failed"}, "always failed"),
        ({"enum": [512, 768]}, "512 or 768"),
        ({"enum": ["a", "b", "c"]}, "a, b or c"),
        ({"$ref": "#/components/schemas/Side"}, "256 or 512"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "string"}]}, "text or whole number"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 20}, "list of up to 20: text"),
        ({}, "any value"),
    ],
)
def test_the_reference_says_in_words_what_a_field_takes(schema: dict[str, Any], words: str) -> None:
    assert kind_of(schema, {"Side": {"enum": [256, 512]}}) == words


@pytest.mark.slow
async def test_a_browser_gets_a_page_also_for_what_is_not_done_an_outage_and_an_error(service: TestService) -> None:
    unreachable = connect("redis://127.0.0.1:1/0")
    down = service.resources.with_parts(catalog=CatalogReader(unreachable))
    at_fault = redis.Redis.from_url(service.resources.redis_url)
    opened, kept = redis_key("loras_open"), redis_key("catalog_digests", "kept")

    async def check(resources: Resources, method: str, path: str, title: str, status: int) -> httpx.Response:
        transport = httpx.ASGITransport(resources.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            page, program = [await client.request(method, path, headers=each) for each in ({"Accept": "text/html"}, {})]
        assert (page.status_code, program.status_code, error_of(program)["code"] != "") == (status, status, True)
        assert f"<h1>{title}</h1>" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        return page

    refused = await check(service.resources, "DELETE", "/docs", "Method not allowed", 405)
    assert refused.headers["allow"] == "GET, HEAD"
    away = await check(down, "GET", "/", "Temporarily unavailable", 503)
    assert int(away.headers["retry-after"]) >= 1
    at_fault.rename(opened, kept)
    at_fault.set(opened, "of another type")
    try:
        await check(service.resources, "GET", "/", "Internal error", 500)
    finally:
        at_fault.rename(kept, opened)
        at_fault.close()
        await unreachable.aclose()


async def test_the_page_of_documents_leads_to_each_operation(service: TestService) -> None:
    text = html.unescape((await page_of(service, "/docs")).text)
    for name in NAMES:
        assert f'href="/docs/{name}"' in text
        assert f'href="/openapi/{name}.json"' in text
        for path, methods in (await document_of(service, name))["paths"].items():
            assert path in text
            assert all(operation["summary"] in text for operation in methods.values())


@pytest.mark.parametrize("name", NAMES)
async def test_every_operation_field_and_parameter_is_described(service: TestService, name: str) -> None:
    """The reference shows the descriptions, and client generators make names of operation ids."""
    document = await document_of(service, name)
    tags = {tag["name"] for tag in document["tags"]}
    found = operations(document)
    assert len({operation["operationId"] for operation in found}) == len(found)
    for operation in found:
        assert re.fullmatch("[a-z][A-Za-z]+", operation["operationId"])
        assert operation["summary"]
        assert set(operation["tags"]) <= tags
        assert all(parameter["description"] for parameter in operation.get("parameters", []))
    for schema in (
        name for name in ("GenerationRequest", "UpscaleRequest") if name in document["components"]["schemas"]
    ):
        for field in document["components"]["schemas"][schema]["properties"].values():
            assert field["description"]


@pytest.mark.parametrize("name", NAMES)
async def test_nothing_of_the_framework_s_own_errors_is_documented(service: TestService, name: str) -> None:
    text = json.dumps(await document_of(service, name))
    assert "422" not in text
    assert "ValidationError" not in text
    assert '"title": "' not in text.replace(json.dumps((await document_of(service, name))["info"])[1:-1], "")


WEBHOOK = "https://1.1.1.1/"
"""An address that needs no name server; nothing is delivered to it here."""


@pytest.mark.parametrize("name", NAMES)
async def test_the_curl_lines_of_a_document_work_when_pasted(service: TestService, member: Member, name: str) -> None:
    """Each line is read as a shell reads it, and then sent."""
    page = await page_of(service, "/docs")
    section = page.text.partition(f'<section id="{name}">')[2].partition("</section>")[0]
    lines = [html.unescape(text) for text in re.findall(r"<pre[^>]*>(curl .*?)</pre>", section, re.DOTALL)]
    assert len(lines) == {"a": 5, "b": 4, "jobs": 25, "loras": 8}[name]
    lines.sort(key=_deletes)
    fields = {} if name == "b" else {"num_images": 2}
    webhook = (await service.resources.webhooks.create(member.account.id, WEBHOOK)).endpoint
    job = await service.complete(await service.submit(member, B if name == "b" else A, **fields))
    known = {"$ATELIER_KEY": member.key, "$REQUEST_ID": job.id, "$RUN_ID": job.id, "$JOB_ID": job.id}
    uploaded = (await service.client.post("/v1/images", headers=member.a, files={"file": CURL_FILE})).json()
    known |= {"/v1/images/$IMAGE_ID": f"/v1/images/{uploaded['id']}", "$IMAGE_ID": job.images[0].image_id}
    known |= {"$WEBHOOK_ID": webhook.id, "$DELIVERY_ID": f"msg_{job.id}_1", "https://example.com/atelier": WEBHOOK}
    await service.resources.accounts.set_password(member.account.id, "correct horse battery staple")
    known['"acme"'] = f'"{member.account.name}"'
    other = await service.member()
    known |= {"$LORA_ID": await _own_lora(service, member), "$ACCOUNT": other.account.id, "zeta": other.account.name}
    for line in lines:
        for variable, value in known.items():
            line = line.replace(variable, value)
        answer = await send_curl(service.client, shlex.split(line.replace("\\\n", " ")))
        if (
            "/v1/upscale" in line or '"upscale"' in line
        ) and "POST" in line:  # the example's image belongs to no account
            assert answer.status_code == 404
        else:
            assert answer.status_code in (200, 201, 202, 204), (line, answer.text)


def _deletes(line: str) -> int:
    """Return the order in which lines are sent: one that deletes what others use comes later."""
    if "/v1/account/delete" in line:
        return 2
    return "DELETE" in line and not re.search("images|grants", line)


async def test_the_curl_line_of_the_landing_page_works_when_pasted(service: TestService, member: Member) -> None:
    text = html.unescape((await page_of(service, "/")).text)
    line = re.findall(r"curl http://[^<]*", text)[0].replace("YOUR_API_KEY", member.key)
    assert (await send_curl(service.client, ["curl", "-s", "-X", "POST", *shlex.split(line)[1:]])).status_code == 202


async def test_what_browsers_and_programs_look_for_is_there(service: TestService) -> None:
    icon = await service.client.get("/favicon.ico")
    robots, llms = (await service.client.get("/robots.txt")), (await service.client.get("/llms.txt"))
    assert icon.headers["content-type"] == "image/svg+xml"
    assert "Disallow: /v1/" in robots.text
    for target in re.findall(r"\]\(([^)]+)\)", llms.text):
        assert (await service.client.get(target)).status_code == 200


async def _own_lora(service: TestService, member: Member) -> str:
    """Register a LoRA with the weights that the example of an upload sends."""
    record = adapter_of(member.account.id, sha256=hashlib.sha256(CURL_FILE).hexdigest())
    await service.resources.adapter_registry.register(record)
    return record.id
