"""Renders `/metrics`, read from Redis at each scrape: every ingress replica shows the same."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from serve_app.domain import metrics
from serve_app.domain.jobs import group_of_pool
from serve_app.domain.metrics import METRICS, PREFIX, Metric, MetricType
from serve_app.domain.requests import Variant
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.images import ImageStore
from serve_app.operations.readiness import what_keeps_jobs_out
from serve_app.store.measures import Measures
from serve_app.store.storage import Space

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Sample(NamedTuple):
    labels: tuple[str, ...]
    value: float


Samples = Mapping[Metric, Sequence[Sample]]


async def render_metrics(
    measures: Measures,
    stats: QueueStats,
    images: ImageStore,
    space: Space,
    plans: Iterable[tuple[Variant, str]],
    *,
    event_streams: int,
) -> bytes:
    """Render the metrics in Prometheus' text format. Raises `StoreUnavailable`."""
    await measures.send()
    registry = CollectorRegistry()
    samples = {**await _read(measures, stats, images, space, plans), metrics.EVENT_STREAMS: [Sample((), event_streams)]}
    from_zero = dict.fromkeys(metrics.fields_from_zero(await stats.pools()), 0.0)
    registry.register(Metrics(samples=samples, measured={**from_zero, **await measures.measured()}))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class Metrics(Collector):
    """Every metric of the table, read at this scrape or measured by all processes."""

    samples: Samples
    measured: Mapping[str, float]

    def collect(self) -> Iterator[Family]:
        rows: dict[str, list[tuple[list[str], float]]] = {metric.name: [] for metric in METRICS}
        for field, value in self.measured.items():
            name, *labels = field.split("|")
            if name in rows:  # a newer version may measure more
                rows[name].append((labels, value))
        for metric in METRICS:
            if metric.type is MetricType.HISTOGRAM:
                yield _histogram(metric, rows[metric.name])
            else:
                read = [Sample(tuple(labels), value) for labels, value in rows[metric.name]]
                yield _family(metric, [*self.samples.get(metric, ()), *read])


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    of_type = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = of_type(PREFIX + metric.name, metric.help, labels=metric.shown_labels)
    for labels, value in sorted(samples):
        family.add_metric(_shown(metric, labels), value)
    return family


def _shown(metric: Metric, labels: Sequence[str]) -> Sequence[str]:
    """Return the values of `shown_labels`."""
    return [labels[0].partition(".")[0], group_of_pool(labels[0]), *labels[1:]] if metric.is_by_pool else labels


def _histogram(metric: Metric, rows: Iterable[tuple[list[str], float]]) -> Family:
    """Build a histogram; the last label of a row is a bucket's bound, or `sum`."""
    by_labels: dict[tuple[str, ...], dict[str, float]] = {}
    for (*labels, part), value in rows:
        by_labels.setdefault(tuple(labels), {})[part] = value
    family = HistogramMetricFamily(PREFIX + metric.name, metric.help, labels=metric.shown_labels)
    bounds = [*(f"{bound:g}" for bound in metric.bounds), "+Inf"]
    for labels, parts in sorted(by_labels.items()):
        counts = accumulate(parts.get(bound, 0.0) for bound in bounds)
        family.add_metric(_shown(metric, labels), list(zip(bounds, counts, strict=True)), parts.get("sum", 0.0))
    return family


async def _read(
    measures: Measures, stats: QueueStats, images: ImageStore, space: Space, plans: Iterable[tuple[Variant, str]]
) -> Samples:
    counts = await stats.counts()
    memory, copy_age = await space.memory.read(), await stats.copy_age()
    return {
        **await _queue(stats, plans),
        **await _workers(measures, await stats.pools()),
        metrics.JOBS: [Sample((event,), counts.get(event, 0)) for event in metrics.EVENTS],
        metrics.DEAD_JOBS: [Sample((), await stats.dead())],
        metrics.WEBHOOKS_WAITING: [Sample((), await stats.webhooks())],
        metrics.ACCEPTING: [Sample((), float(not await what_keeps_jobs_out(images, space)))],
        metrics.REDIS_MEMORY: [Sample((), memory.used)] if memory else [],
        metrics.REDIS_MEMORY_LIMIT: [Sample((), memory.limit)] if memory else [],
        metrics.BACKUP_AGE: [] if copy_age is None else [Sample((), copy_age.total_seconds())],
    }


async def _queue(stats: QueueStats, plans: Iterable[tuple[Variant, str]]) -> Samples:
    backlogs = {pool: await stats.backlog(pool) for pool in await stats.pools()}
    waiting = await stats.waiting([":".join(plan) for plan in plans])
    by_plan = {(pool, *plan.split(":", 1)): row for (pool, plan), row in waiting.items()}
    return {
        metrics.JOBS_READY: [Sample((pool,), backlog.ready) for pool, backlog in backlogs.items()],
        metrics.JOBS_LEASED: [Sample((pool,), backlog.leased) for pool, backlog in backlogs.items()],
        metrics.JOBS_DELAYED: [Sample((pool,), backlog.delayed) for pool, backlog in backlogs.items()],
        metrics.BACKLOG_SECONDS: [Sample((pool,), backlog.seconds) for pool, backlog in backlogs.items()],
        metrics.OLDEST_JOB_AGE: [Sample((pool,), backlog.oldest_age_s) for pool, backlog in backlogs.items()],
        metrics.JOBS_WAITING: [Sample(labels, row.jobs) for labels, row in by_plan.items()],
        metrics.OLDEST_WAITING: [Sample(labels, row.oldest_age_s) for labels, row in by_plan.items()],
    }


async def _workers(measures: Measures, pools: Sequence[str]) -> Samples:
    """Return the live workers by pool, and the sums of their gauges."""
    shown = {pool: await measures.shown(pool) for pool in pools}
    sums: dict[Metric, list[Sample]] = {
        metrics.WORKERS: [Sample((pool,), len(workers)) for pool, workers in shown.items()]
    }
    by_name = {metric.name: metric for metric in METRICS}
    for pool, workers in shown.items():
        totals: defaultdict[str, float] = defaultdict(float)
        for worker in workers:
            for field, value in worker.gauges.items():
                totals[field] += value
        for field, total in totals.items():
            name, *labels = field.split("|")
            if name in by_name:  # a newer version may measure more
                sums.setdefault(by_name[name], []).append(Sample((pool, *labels), total))
    return sums
