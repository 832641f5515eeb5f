"""The operations of `/v1/jobs` and `/v1/usage`, which both interfaces share."""

from typing import Any
from urllib.parse import quote, urlencode

from serve_app.client.protocol import Call, Operation, Service
from serve_app.client.records import Record, Usage

PAGE = 100


def list_jobs(service: Service, limit: int) -> Operation[list[Record]]:
    """The newest jobs of the account, newest first, over as many pages as it takes."""
    found: list[Record] = []
    cursor: dict[str, str] = {}
    while len(found) < limit:
        query = urlencode({"limit": min(PAGE, limit - len(found)), **cursor})
        page = yield from _json(service, "GET", f"/v1/jobs?{query}")
        found += [Record.read_job(row) for row in page["jobs"]]
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}
    return found


def cancel_job(service: Service, job_id: str) -> Operation[Record]:
    row = yield from _json(service, "POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel")
    return Record.read_job(row)


def delete_image(service: Service, job_id: str, image_id: str) -> Operation[None]:
    return service.delete_at(f"/v1/jobs/{quote(job_id, safe='')}/images/{quote(image_id, safe='')}")


def usage(service: Service, days: int) -> Operation[list[Usage]]:
    body = yield from _json(service, "GET", f"/v1/usage?{urlencode({'days': days})}")
    return [Usage.read(row) for row in body["usage"]]


def _json(service: Service, method: str, path: str) -> Operation[Any]:
    response = yield from service.send(Call(method, service.base_url + path, service.credential(service.interface)))
    return response.json()
