"""HAProxy runs as Serve starts it, through the wrapper, before a server that answers as tests want."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deployments.proxy import HTTP_SERVERS, LIMITS, METRICS, WRAPPER, environment, haproxy_binary, proxy_secret
from deployments.proxy.answers import take
from deployments.runtime import RECOVERY
from serve_app.domain.accounts import BUILTIN_PLANS
from serve_app.domain.requests import Variant
from tests.attack.raw import Answer, breach, exchange, first_line
from tests.manifests.chart import find, rendered
from tests.support import ROOT, free_port, until

ENVIRONMENT = {**os.environ, **environment(), "RAY_AUTH_TOKEN": "a token"}

pytestmark = pytest.mark.skipif(haproxy_binary() is None, reason="HAProxy comes with ray[serve] on Linux")


def generated_config(
    home: Path,
    *,
    port: int,
    replica_port: int | None,
    fallback_port: int | None = None,
    has_application: bool = True,
    limit_s: int = 60,
) -> Path:
    """Write what this version of Serve generates for one application, maybe without a replica, or before there is one."""
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

    replicas = [haproxy.ServerConfig(name="replica", host="127.0.0.1", port=replica_port)] if replica_port else []
    fallback = haproxy.ServerConfig(name="fallback", host="127.0.0.1", port=fallback_port) if fallback_port else None
    backend = haproxy.BackendConfig(
        name="http-atelier", path_prefix="/", app_name="atelier", servers=replicas, fallback_server=fallback
    )
    config = haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=5),
        socket_path=str(home / "node" / "admin.sock"),
        metrics_socket_path=str(home / "node" / "metrics.sock"),
        server_state_base=str(home / "node"),
        server_state_file=str(home / "node" / "server-state"),
        stats_port=free_port(),
        metrics_port=free_port(),
        health_check_inter="100ms",
        health_check_fastinter="50ms",
        health_check_downinter="50ms",
        timeout_client_s=limit_s,
        timeout_server_s=limit_s,
        bufsize=int(LIMITS["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
    )
    file = home / "node" / "haproxy.cfg"
    backends = {backend.name: backend} if has_application else {}
    api = haproxy.HAProxyApi(config, backends, config_file_path=str(file))
    api.cfg.has_received_routes = api.cfg.has_received_servers = has_application
    api._generate_config_file_internal()  # pyright: ignore[reportPrivateUsage]
    return file


class Proxy:
    """A running HAProxy and the server behind it, or that of another as the proxy of last resort.

    The server repeats each request as JSON, or answers as `X-Answer` says.
    """

    def __init__(
        self,
        home: Path,
        *,
        has_application: bool = True,
        fallback: "Proxy | None" = None,
        limit_s: int = 60,
        rules: str = "",
        **variables: str,
    ) -> None:
        self.home, self.port, self.replica_port = home, free_port(), free_port()
        self.admin = home / "node" / "admin.sock"
        ports = {"port": self.port, "replica_port": self.replica_port}
        last = fallback and fallback.replica_port
        self.config = generated_config(
            home, **ports, fallback_port=last, has_application=has_application, limit_s=limit_s
        )
        self.config.write_text(
            self.config.read_text().replace(
                "    # Servers in this backend\n", f"{rules}    # Servers in this backend\n"
            )
        )
        command = [str(WRAPPER), "-db", "-f", str(self.config)]
        stderr = (home / "stderr.txt").open("wb")
        self.process = self.replaced = subprocess.Popen(command, env={**ENVIRONMENT, **variables}, stderr=stderr)
        config = uvicorn.Config(answer, "127.0.0.1", self.replica_port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()))
        self._thread.start()

    def send(self, *parts: bytes, source: str = "", timeout: float = 15) -> list[Answer]:
        return exchange(self.port, *parts, source=source, timeout=timeout)

    def ask(self, *rows: str, path: str = "/", source: str = "") -> list[Answer]:
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Connection: close", *rows]
        return self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n", source=source)

    def get(self, *rows: str, path: str = "/", source: str = "") -> Answer:
        (answer,) = self.ask(*rows, path=path, source=source)
        return answer

    def wait(self, status: int = 200, *, path: str = "/", source: str = "") -> None:
        """Wait until HAProxy listens and has found the server."""
        for _ in range(200):
            try:
                if self.get(path=path, source=source).status == status:
                    return
            except (OSError, ValueError):
                pass
            threading.Event().wait(0.05)
        raise AssertionError((self.home / "stderr.txt").read_text())

    def reload(self) -> None:
        """Put another HAProxy in this one's place, as Serve does, and wait until it has its admin socket."""
        generated_config(self.home, port=self.port, replica_port=self.replica_port)
        command = [str(WRAPPER), "-db", "-f", str(self.config), "-sf", str(self.process.pid), "-x", str(self.admin)]
        self.replaced, self.process = self.process, subprocess.Popen(command, env=ENVIRONMENT)
        until(lambda: f"Pid: {self.process.pid}\n" in self.tell("show info"))

    def tell(self, command: str) -> str:
        """Give a command to the admin socket, and return the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.admin))
            connection.sendall(f"{command}\n".encode())
            return connection.makefile().read()

    def stop_server(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def stop(self) -> None:
        for process in (self.process, self.replaced):
            process.kill()
            process.wait()
        self.stop_server()


@contextmanager
def running(home: Path, *, status: int = 200, **given: Any) -> Generator[Proxy]:
    """Run a proxy until the block ends; it answers with `status` from the start."""
    proxy = Proxy(home, **given)
    try:
        proxy.wait(status)
        yield proxy
    finally:
        proxy.stop()


unanswered: Queue[str] = Queue()
"""What reached the server of a request that it does not answer."""
released = threading.Event()
"""Whether it answers those that it held."""
draining = threading.Event()
"""Whether it tells health checks that it drains, as a replica of Serve does."""
drained: Counter[int] = Counter()
"""How often it has told them so, by its port."""


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """`X-Answer: 500 plain` answers as Serve does, without rate headers; `none` waits until the caller hangs up.

    `held` waits until the test lets it go.
    """
    if scope["path"] == "/-/healthz":
        drained[scope["server"][1]] += draining.is_set()
        await send({"type": "http.response.start", "status": 503 if draining.is_set() else 200, "headers": []})
        await send({"type": "http.response.body", "body": b"DRAINING" if draining.is_set() else b"success"})
        return
    headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
    status, plain = ([*headers.get("x-answer", "200").split(), ""])[:2]
    if status == "none":
        unanswered.put("headers")
        while unanswered.put(kind := (await receive())["type"]) or kind != "http.disconnect":
            pass
        return
    if status == "held":
        unanswered.put("held")
        await asyncio.to_thread(released.wait, 30)
        status = "200"
    sent = {**scope, "headers": headers}
    content = {name: sent[name] for name in ("method", "path", "scheme", "client", "headers")}
    rows = [(b"content-type", b"text/plain" if plain else b"application/json")]
    if not plain:
        rows += [(name, b"1") for name in (b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset")]
        rows += [(b"ratelimit-policy", b"x"), (b"ratelimit", b"x")]
        rows.append((b"x-request-id", headers.get("x-request-id", "health-check").encode()))
    await send({"type": "http.response.start", "status": int(status), "headers": rows})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running(tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy that knows no application yet."""
    with running(tmp_path_factory.mktemp("starting"), status=503, has_application=False) as proxy:
        yield proxy


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return generated_config(tmp_path, port=free_port(), replica_port=free_port())


def seen(answer: Answer) -> dict[str, Any]:
    """The request as the server behind has seen it."""
    assert answer.status == 200, answer
    return json.loads(answer.body)


def code(answer: Answer) -> str:
    assert breach(answer) is None, breach(answer)
    return json.loads(answer.body)["error"]["code"]


@pytest.mark.parametrize(
    "row",
    [
        "X-Request-Timeout-Seconds: 0.001",
        "X-Request-Disconnect-Disabled: ?1",
        "Serve_Multiplexed_Model_Id: a",
        "Serve-Multiplexed-Model-Id: \xff",
        "Serve_Multiplexed-Model-Id: \xff",
        "X-Serve-Router-Target: a",
        "X-Session-Id: \xff",
        "Upgrade: websocket",
        "Expect: 200-ok",
        "X-Forwarded-Host: evil.example",
        "X-Forwarded-Proto: https",
        "Forwarded: for=1.2.3.4;proto=https",
        "X-Real-Ip: 1.2.3.4",
    ],
)
def test_a_header_that_serve_or_the_application_would_obey_does_not_pass(proxy: Proxy, row: str) -> None:
    name = row.partition(":")[0].lower()
    assert name not in seen(proxy.get(row))["headers"]


def test_serve_watches_only_the_callers_whose_answer_may_take_long(proxy: Proxy) -> None:
    def is_watched(path: str, *rows: str) -> bool:
        return "x-request-disconnect-disabled" not in seen(proxy.get(*rows, path=path))["headers"]

    assert not is_watched("/v1/generate/gen_a")
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    paths = (b"/console/sign-in", b"/openai/v1/images/generations", b"/mcp")
    posted, *drawn = (seen(*proxy.send(head % path)) for path in paths)
    assert "x-request-disconnect-disabled" in posted["headers"], "else a body is read before it is asked for"
    for each in drawn:
        assert "x-request-disconnect-disabled" not in each["headers"], "a caller that leaves cancels its images"
    assert is_watched("/v1/generate/gen_a", "Prefer: wait=30"), "a caller that leaves gives its place back"
    assert is_watched("/files/images/x.png")


@pytest.mark.parametrize("given", ["", "short", "a" * 129, "with space", "quote\"'", "\xff" * 20])
def test_a_request_id_that_is_not_fit_for_logs_is_replaced(proxy: Proxy, given: str) -> None:
    answer = proxy.get(f"X-Request-Id: {given}")
    assert re.fullmatch(r"req_[0-9a-f-]{36}", seen(answer)["headers"]["x-request-id"])
    assert answer.header("x-request-id") == seen(answer)["headers"]["x-request-id"]


def test_a_good_request_id_is_kept(proxy: Proxy) -> None:
    assert proxy.get("X-Request-Id: my-own_id.1").header("x-request-id") == "my-own_id.1"
    twice = proxy.get("X-Request-Id: my-own_id.1", "X-Request-Id: my-own_id.2")
    assert str(twice.header("x-request-id")).startswith("req_")


def test_nobody_is_believed_about_his_address_by_default(proxy: Proxy) -> None:
    request = seen(proxy.get("X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 5.6.7.8", source="127.0.0.9"))
    assert request["headers"]["x-forwarded-for"] == "127.0.0.9"
    assert (request["client"][0], request["scheme"]) == ("127.0.0.9", "http")


def test_every_request_carries_what_replicas_believe_haproxy_by(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", ENVIRONMENT["RAY_AUTH_TOKEN"])
    for row in ("X-Other: a", f"X-Atelier-Proxy: {'0' * 64}"):
        assert seen(proxy.get(row))["headers"]["x-atelier-proxy"] == proxy_secret()


@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"])
def test_both_find_rays_token_where_ray_does(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("of a file\n")
    given = {"RAY_AUTH_TOKEN": "given", "RAY_AUTH_TOKEN_PATH": str(file), "HOME": str(tmp_path)}[place]
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(place, given)
    assert check(config, **{"RAY_AUTH_TOKEN": "", place: given}).returncode == 0
    assert f"set-header X-Atelier-Proxy {proxy_secret()}\n" in config.read_text()


def test_without_a_token_haproxy_does_not_start(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas would take every caller for one and the same."""
    done = check(config, RAY_AUTH_TOKEN="", HOME=str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith("atelier: Ray's token was not found: set RAY_AUTH_TOKEN_PATH")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="Ray's token was not found"):
        proxy_secret()


def test_a_trusted_proxy_names_the_caller_and_the_scheme(tmp_path: Path) -> None:
    with running(tmp_path, ATELIER_TRUSTED_PROXIES="127.0.0.9, 10.0.0.0/8") as proxy:
        rows = ("X-Forwarded-For: 6.6.6.6, 1.2.3.4, 10.1.2.3", "X-Forwarded-Proto: https")
        request = seen(proxy.get(*rows, source="127.0.0.9"))
        assert request["headers"]["x-forwarded-for"] == "1.2.3.4", "the last one that is no trusted proxy"
        assert (request["client"][0], request["scheme"]) == ("1.2.3.4", "https")
        assert seen(proxy.get(*rows, source="127.0.0.8"))["client"][0] == "127.0.0.8"
        assert seen(proxy.get("X-Forwarded-Proto: javascript", source="127.0.0.9"))["scheme"] == "http"


@pytest.mark.parametrize(
    ("name", "value"), [("ATELIER_TRUSTED_PROXIES", "everybody; }"), ("ATELIER_CONNECTIONS_PER_ADDRESS", "many")]
)
def test_a_bad_setting_keeps_haproxy_from_starting(config: Path, name: str, value: str) -> None:
    done = check(config, **{name: value})
    assert done.returncode == 3
    assert done.stderr.startswith(f"atelier: {name}: ")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[::1]", "127.0.0.2", "localhost"])
def test_haproxy_alone_listens_where_the_operator_says(config: Path, host: str) -> None:
    assert check(config, ATELIER_HTTP_HOST=host).returncode == 0
    assert re.search(rf"^    bind {re.escape(host)}:\d+ proto h1$", config.read_text(), re.MULTILINE)


def check(config: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Harden a configuration and let HAProxy check it."""
    command = [str(WRAPPER), "-c", "-f", str(config)]
    return subprocess.run(command, env={**ENVIRONMENT, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("given", "status", "expected"),
    [
        ("503 plain", 503, "overloaded"),
        ("500 plain", 503, "unavailable"),
        ("502 plain", 503, "unavailable"),
        ("404 plain", 404, "not_found"),
        ("400 plain", 400, "invalid_parameter"),
        ("408 plain", 400, "invalid_parameter"),
    ],
)
def test_an_answer_of_serve_itself_gets_the_contracts_form(
    proxy: Proxy, given: str, status: int, expected: str
) -> None:
    answer = proxy.get(f"X-Answer: {given}")
    assert (answer.status, code(answer)) == (status, expected)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_answer_of_the_application_stays_as_it_is(proxy: Proxy, status: int) -> None:
    answer = proxy.get(f"X-Answer: {status}")
    assert answer.status == status
    assert json.loads(answer.body)["path"] == "/"
    assert answer.header("x-ratelimit-limit") == "1"


@pytest.mark.parametrize(("path", "variant"), [("/nowhere", Variant.A), ("/v1/models", Variant.B)])
def test_the_rate_headers_are_those_of_the_lowest_plan(proxy: Proxy, path: str, variant: Variant) -> None:
    plan = next(plan for plan in BUILTIN_PLANS if plan.variant is variant)
    answer = proxy.get("X-Answer: 404 plain", path=path)
    seconds = round(plan.window.total_seconds())
    assert answer.header("x-ratelimit-limit") == str(plan.limit)
    assert answer.header("ratelimit-policy") == f'"{plan.policy_name}";q={plan.limit};w={seconds}'
    assert answer.header("ratelimit") == f'"{plan.policy_name}";r={plan.limit};t={seconds}'


@pytest.mark.parametrize("method", ["FOO", "get", "PROPFIND", "TRACE"])
def test_a_strange_method_reaches_the_application_as_one_that_no_address_takes(proxy: Proxy, method: str) -> None:
    (answer,) = proxy.send(f"{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    assert seen(answer)["method"] == "TRACE"


def test_a_request_is_passed_on_before_its_body(proxy: Proxy) -> None:
    """The application refuses it, or asks for the body by 100 Continue."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"
    assert first_line(proxy.port, head) == b"HTTP/1.1 200 OK"


def test_a_caller_that_hangs_up_is_noticed_although_its_body_came_after_its_headers(proxy: Proxy) -> None:
    """So send httpx, OpenAI's client and most others; one packet for both hides what this test sees."""
    with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
        caller.sendall(b"POST /openai/ HTTP/1.1\r\nHost: a\r\nX-Answer: none\r\nContent-Length: 2\r\n\r\n")
        assert unanswered.get(timeout=5) == "headers"
        caller.sendall(b"{}")
        assert unanswered.get(timeout=5) == "http.request"
    assert unanswered.get(timeout=5) == "http.disconnect"


@contextmanager
def held(proxy: Proxy) -> Generator[Future[Answer]]:
    """Ask for images, which are drawn only once the block lets the server answer."""
    released.clear()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(proxy.get, "X-Answer: held", path="/openai/v1/images/generations")
        assert unanswered.get(timeout=5) == "held"
        try:
            yield asked
        finally:
            released.set()


def test_an_answer_below_openai_may_take_longer_than_any_other(tmp_path: Path) -> None:
    """It is begun before another request, and answered after HAProxy has given that one up."""
    with running(tmp_path, limit_s=1) as proxy, held(proxy) as images:
        other = proxy.get("X-Answer: held", path="/v1/jobs")
        assert (other.status, code(other)) == (503, "unavailable")
        assert unanswered.get(timeout=5) == "held"
        released.set()
        assert seen(images.result(timeout=10))["path"] == "/openai/v1/images/generations"


@pytest.mark.slow
def test_headers_have_to_arrive_in_time(proxy: Proxy) -> None:
    began = time.monotonic()
    assert proxy.send(b"GET / HTTP/1.1\r\nHos", timeout=30) == []
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "row",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: br, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip, chunked",
        b"Upgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: deflate, chunked",
    ],
)
def test_what_is_not_http_is_closed_without_an_answer(proxy: Proxy, row: bytes) -> None:
    """HAProxy 2.8 would answer in HTML, before any rule."""
    assert proxy.send(b"POST / HTTP/1.1\r\nHost: a\r\n" + row + b"\r\n\r\n0\r\n\r\n") == []


def test_every_error_that_haproxy_can_make_has_the_contracts_form(tmp_path: Path) -> None:
    """A rule of a later version of Serve may ask for any of them."""
    allowed = {400, 404, 405, 408, 413, 429, 500, 503}
    every = allowed | {401, 403, 407, 410, 421, 422, 425, 501, 502, 504}
    rules = "".join(f"    http-request deny deny_status {each} if {{ path /{each} }}\n" for each in every)
    with running(tmp_path, rules=rules) as proxy:
        for each in every:
            answer = proxy.get(path=f"/{each}")
            assert answer.status == (each if each in allowed else 503 if each in (502, 504) else 400)
            assert set(json.loads(answer.body)["error"]) == {"code", "message"}
            assert breach(answer) is None or each in (405, 500), breach(answer)


def test_what_haproxy_answers_itself_is_counted_once_over_its_reloads(tmp_path: Path) -> None:
    with running(tmp_path) as proxy:
        take(proxy.admin)  # what was asked before HAProxy had found the server
        with held(proxy) as images:
            for given in ("503 plain", "503 plain", "404 plain", "500", "404"):
                proxy.get(f"X-Answer: {given}")
            proxy.get(path="/-/nowhere")
            proxy.reload()
            proxy.get("X-Answer: 503 plain")
            assert take(proxy.admin) == {"4xx": 1, "5xx": 3}, "of both, and none of the application"
            assert take(proxy.admin) == {}
            released.set()
            assert images.result(timeout=10).status == 200, "the replaced HAProxy answers what it has begun"
        assert "\n    hard-stop-after 600s\n" in proxy.config.read_text()
        proxy.stop_server()
        assert proxy.get().status == 503
        assert take(proxy.admin) == {"5xx": 1}
    with pytest.raises(FileNotFoundError):
        take(tmp_path / "elsewhere" / "admin.sock")


def test_a_request_without_a_host_is_refused(proxy: Proxy) -> None:
    (answer,) = proxy.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert (answer.status, code(answer)) == (400, "invalid_parameter")


def test_one_address_can_neither_take_all_connections_nor_read_the_routes(tmp_path: Path) -> None:
    """A proxy on this machine, or a trusted one, may take them: it stands for many callers."""
    with running(tmp_path, ATELIER_CONNECTIONS_PER_ADDRESS="0", ATELIER_TRUSTED_PROXIES="127.0.0.9") as proxy:
        assert proxy.get(source="127.0.0.9").status == 200
        proxy.config.write_text(proxy.config.read_text().replace("127.0.0.0/8 ::1", "127.0.0.1"))
        command = [str(WRAPPER), "-db", "-f", str(proxy.config), "-sf", str(proxy.process.pid)]
        reloaded = subprocess.Popen(command, env=ENVIRONMENT)
        try:
            proxy.process.wait(timeout=30)
            proxy.wait()
            assert proxy.get(source="127.0.0.9").status == 200
            assert proxy.get(path="/-/routes", source="127.0.0.1").status != 404
            assert proxy.get(path="/-/routes", source="127.0.0.9").status == 404, "it is for this machine alone"
            proxy.wait(path="/-/healthz", source="127.0.0.9")  # after its first check of the server
            with suppress(ConnectionError):  # or it is closed without a word, whichever the kernel sees first
                assert proxy.ask(source="127.0.0.8") == []
        finally:
            reloaded.kill()
            reloaded.wait()


def test_replicas_serve_on_while_serve_names_none(tmp_path: Path, proxy: Proxy) -> None:
    """So it does while it builds the application of a new `serve deploy`, and after a build that failed."""
    with running(tmp_path) as old:
        serve = partial(generated_config, tmp_path, port=old.port, replica_port=None, fallback_port=proxy.replica_port)
        for _ in range(2):
            serve()
            command = [str(WRAPPER), "-db", "-f", str(old.config), "-sf", str(old.process.pid)]
            old.process, ended = subprocess.Popen(command, env=ENVIRONMENT), old.process
            ended.wait(timeout=30)
            assert {old.get().status for _ in range(20)} == {200}
        serve()
        assert subprocess.run([str(WRAPPER), "-c", "-f", str(old.config)], env=ENVIRONMENT).returncode == 0
        assert "server replica" not in old.config.read_text(), "a new HAProxy knows nothing of an earlier Serve"


def test_a_replica_that_drains_serves_until_its_successor_is_named(tmp_path: Path) -> None:
    """Serve ends it in the moment in which it names the other, and HAProxy hears of that by a reload alone."""
    with running(tmp_path) as proxy:
        draining.set()
        try:
            until(lambda: drained[proxy.replica_port] >= 4)
            assert proxy.get().status == 200
        finally:
            draining.clear()


def test_without_a_replica_the_answer_is_503(tmp_path: Path, proxy: Proxy) -> None:
    """Serve's proxy of last resort, which is there, would hold the request until a replica is."""
    with running(tmp_path, fallback=proxy) as alone:
        alone.stop_server()
        answer = alone.get()
        assert (answer.status, code(answer)) == (503, "unavailable")
        health = alone.get(path="/-/healthz")
        assert health.status in (200, 503)
        assert breach(health) is None


@pytest.mark.parametrize("path", ["/", "/v1/models", "/-/healthz", "/-/routes"])
def test_before_serve_has_an_application_the_answer_is_503(starting: Proxy, path: str) -> None:
    answer = starting.get(path=path)
    assert (answer.status, code(answer)) == (503, "unavailable")


def test_what_belongs_to_operators_is_closed_to_others(proxy: Proxy) -> None:
    text = proxy.config.read_text()
    binds = re.findall(r"^ *bind (\S+)", text, flags=re.MULTILINE)
    assert binds == [f"127.0.0.1:{proxy.port}"], "no statistics"
    assert (proxy.home / "node" / "admin.sock").stat().st_mode & 0o777 == 0o600
    assert proxy.config.stat().st_mode & 0o077 == 0
    assert "option httplog" not in text
    assert re.findall(r"^ *log (?!global)(\S+)", text, flags=re.MULTILINE) == [
        str(proxy.home / "node" / "metrics.sock")
    ]


def test_a_configuration_is_hardened_once(proxy: Proxy) -> None:
    before = proxy.config.read_text()
    assert check(proxy.config).returncode == 0
    assert proxy.config.read_text() == before
    assert before.count("frontend.cfg") == 1


@pytest.mark.parametrize(
    "line", ["stats socket", "frontend http_frontend", "defaults", "listen stats", "retry-on", "http-check expect"]
)
def test_a_configuration_that_is_not_known_is_not_started(config: Path, line: str) -> None:
    """A new version of Serve may write another; without its protection HAProxy must not listen."""
    config.write_text(re.sub(rf"^( *){line}", r"\1# ", config.read_text(), flags=re.MULTILINE))
    done = check(config)
    assert done.returncode == 3
    assert "not started without its protection" in done.stderr


def test_the_wrapper_becomes_haproxy_within_the_time_serve_waits(config: Path) -> None:
    command = ["bash", "-c", f"TIMEFORMAT=%U+%S; time {WRAPPER} -v -f {config}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "HAProxy version" in done.stdout
    assert sum(float(part) for part in done.stderr.strip().splitlines()[-1].split("+")) < 0.2, "seconds of CPU"


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the environment is elsewhere")
def test_haproxy_is_found_where_the_checkouts_environment_is_not_active(config: Path) -> None:
    """`.venv/bin/ray start` and `.venv/bin/serve deploy` leave PATH as it is."""
    inactive = {**ENVIRONMENT, "PATH": "/usr/bin:/bin", "ATELIER_HAPROXY": ""}
    done = subprocess.run([str(WRAPPER), "-v", "-f", str(config)], env=inactive, capture_output=True, text=True)
    assert "HAProxy version" in done.stdout, done.stderr


def ways_of_starting() -> dict[str, dict[str, str]]:
    """What each way of starting on a cluster puts into the environment; `up` and `serve run` take `environment()`."""
    sourced = subprocess.run(
        ["sh", "-c", ". configs/cluster.env; set"],
        cwd=ROOT,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = (line.partition("=") for line in sourced.stdout.splitlines())
    head = find(rendered("many-gpus"), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    chart = {row["name"]: row["value"] for row in head["containers"][0]["env"] if "value" in row}
    return {"cluster.env": {name: value.strip("'") for name, _, value in rows}, "chart": chart}


@pytest.mark.parametrize("way", ["cluster.env", "chart"])
def test_every_way_of_starting_sets_the_same(way: str) -> None:
    found = ways_of_starting()[way]
    wanted = environment() | RECOVERY
    same = (*HTTP_SERVERS, *LIMITS, *METRICS, *RECOVERY, "RAY_SERVE_ENABLE_HA_PROXY")
    assert {name: found[name] for name in same} == {name: wanted[name] for name in same}
    assert Path(found["RAY_SERVE_HAPROXY_BINARY_PATH"]).parts[-3:] == WRAPPER.parts[-3:]
    assert "FORWARDED_ALLOW_IPS" not in found, "uvicorn would believe whoever reaches a replica's port"
    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE"):
        place = found[f"RAY_SERVE_HAPROXY_{name}"]
        assert not place.startswith("/tmp/haproxy-serve"), "Ray's default, where any user may be first"
        assert len(place) + len("/") + 56 <= 97, "with the node's id, what a socket's path may have"
