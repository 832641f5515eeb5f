"""Alert rules and the dashboard name exported metrics, and the chart brings them to Prometheus and Grafana."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.domain.metrics import METRICS, MetricType
from serve_app.operations.store_checks import MEMORY_WARNING
from serve_app.store.measures import RedisMemory
from serve_app.store.redis_copy import COPY_DUE
from tests.manifests.chart import find, rendered
from tests.support import ROOT

MONITORING = ROOT / "configs" / "monitoring"
PROMTOOL = shutil.which("promtool")
RUNBOOKS = "docs/operate/runbooks.md"
OF_PROMETHEUS = {"instance", "le", "namespace"}
"""Labels that Prometheus adds, and a histogram's."""


def exported() -> dict[str, set[str]]:
    """Every series of `/metrics`, with its labels."""
    series: dict[str, set[str]] = {}
    for metric in METRICS:
        ends = ("_bucket", "_count", "_sum") if metric.type is MetricType.HISTOGRAM else ("",)
        series |= {metric.full_name + end: {*metric.shown_labels, *OF_PROMETHEUS} for end in ends}
    return series


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def panels() -> list[dict[str, Any]]:
    return json.loads((MONITORING / "dashboard.json").read_text())["panels"]


def objectives() -> list[str]:
    """The queries of the service levels that are proposed."""
    text = (ROOT / "docs" / "operate" / "objectives.md").read_text()
    return re.findall(r"```promql\n(.*?)```", text, flags=re.DOTALL)


def queries() -> Iterator[tuple[str, str]]:
    """Each expression, with the place where it stands."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    yield from (("objectives", query) for query in objectives())


def test_the_alerts_of_redis_come_before_new_jobs_are_refused_and_as_the_doctor_warns() -> None:
    (expression,) = [rule["expr"] for rule in rules() if rule["alert"] == "AtelierRedisMemory"]
    share = float(expression.rpartition(" > ")[2])
    assert RedisMemory(used=int(share * 1_000), limit=1_000).is_short is False
    assert share == MEMORY_WARNING
    (expression,) = [rule["expr"] for rule in rules() if rule["alert"] == "AtelierBackupMissing"]
    assert expression.endswith(f" > {COPY_DUE.total_seconds():.0f}"), "as the doctor warns"


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_a_query_names_series_and_labels_that_are_exported(place: str, query: str) -> None:
    series = exported()
    named = re.findall(r"(atelier_\w+)(?:\{([^}]*)\})?", query)
    assert named, place
    for name, selectors in named:
        assert name in series, place
        assert "namespace=" in selectors, f"{place}: another installation's numbers would count"
        assert set(re.findall(r"(\w+)[=!]~?", selectors)) <= series[name], place
    grouped = {label for labels in re.findall(r"(?:by|on) \(([^)]*)\)", query) for label in labels.split(", ")}
    assert all(grouped <= series[name] for name, _ in named), place
    assert query.count("(") == query.count(")"), place
    assert any(word in query for word in ("max", "min", "absent")), (
        f"{place}: every ingress replica shows the same: a sum would count it often"
    )


def test_every_alert_has_its_section_among_the_runbooks() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / RUNBOOKS).read_text(), flags=re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"


def test_the_dashboard_shows_every_metric() -> None:
    named = [name for _, query in queries() for name in re.findall(r"atelier_\w+", query)]
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in named}
    assert {metric.full_name for metric in METRICS} <= shown


def test_the_documents_have_every_metric() -> None:
    text = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    rows = re.findall(r"^\| (`atelier_[^|]*) \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    words = re.compile(r"\w+").findall
    documented = {name: (kind, (*words(labels),)) for names, kind, labels in rows for name in words(names)}
    assert documented == {metric.full_name: (metric.type.value, metric.shown_labels) for metric in METRICS}


def test_the_chart_installs_both_with_the_monitor() -> None:
    documents = rendered("production")
    rule = find(documents, "PrometheusRule")
    own = json.dumps(rule["spec"]["groups"][0]["rules"])
    assert '=~\\".*' not in own, "another namespace's numbers would count"
    assert json.loads(own.replace('namespace=\\"atelier\\"', 'namespace=~\\".*\\"')) == rules()
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack", "what this Prometheus selects by"
    dashboard = find(documents, "ConfigMap", "atelier-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["atelier.json"])["panels"] == panels()
    kinds = {document["kind"] for document in rendered("many-gpus")}
    assert "PrometheusRule" not in kinds, "the kind is known only where the operator of Prometheus is installed"


@pytest.mark.skipif(
    PROMTOOL is None,
    reason="Prometheus' own parser has not read the alerts and the dashboard: no promtool on PATH (Debian: prometheus)",
)
@pytest.mark.parametrize("place", ["alerts", "dashboard", "objectives"])
def test_prometheus_takes_the_rules_and_finds_a_planted_fault(place: str, tmp_path: Path) -> None:
    """The queries of the dashboard and of the objectives are rules here, with Grafana's variables filled in."""
    if place == "alerts":
        groups: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    else:
        shown = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
        queries = shown if place == "dashboard" else objectives()
        filled = [re.sub(r"\$__\w+", "5m", query) for query in queries]
        rows = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(filled)]
        groups = {"groups": [{"name": "dashboard", "rules": rows}]}
    assert _promtool(groups, tmp_path) == 0
    groups["groups"][0]["rules"][-1]["expr"] += " by (kind) by"
    assert _promtool(groups, tmp_path) != 0


def _promtool(groups: dict[str, Any], folder: Path) -> int:
    assert PROMTOOL
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(groups))
    return subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, timeout=60).returncode
