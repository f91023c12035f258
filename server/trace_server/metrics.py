"""Every instrument of the server. Base units, prefix ``trace_store_``, labels from closed sets only: the number of
series does not depend on runs, trajectories or clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trace_server.storage_metrics import disk_state_gauge, storage_counters, tier_gauges
from trace_server.usage import LastUsage
from trace_store import errors
from trace_store.engine import Engine
from trace_store.planner import MissingReason
from trace_store.record import DURABILITIES

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a creation time per series doubles the scrape and nobody alerts on it


class Metrics:
    """Instruments over one registry. All label values exist from the start."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        self.append_bytes = Counter("trace_store_append_bytes", "Payload bytes accepted by Append", registry=registry)
        self.append_records = Counter(
            "trace_store_append_records", "Records in accepted appends, by what became of them", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.read_bytes = Counter("trace_store_read_bytes", "Payload bytes sent by Read", registry=registry)
        self.read_rows = Counter("trace_store_read_rows", "Token rows sent by Read, over all sites", registry=registry)
        self.missing_rows = Counter(
            "trace_store_missing_rows", "Token rows that Read reported as missing, by reason", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.stalled_readers = Counter(
            "trace_store_stalled_readers", "Reads ended because their reader took nothing", registry=registry
        )
        self.seals = Counter("trace_store_seals", "Trajectories sealed", registry=registry)
        self.releases = Counter("trace_store_released_trajectories", "Trajectories released", registry=registry)
        self.errors = Counter(
            "trace_store_errors", "Calls and messages refused, by error", ["error"], registry=registry
        )
        self.append_seconds = Histogram(
            "trace_store_append_seconds", "Arrival of an append message to its answer, by durability", ["durability"],
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.seal_seconds = Histogram(
            "trace_store_seal_seconds", "Duration of Seal", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self.read_seconds = Histogram(
            "trace_store_read_seconds", "Duration of Read", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self.streams = Gauge("trace_store_append_streams", "Append streams open now", registry=registry)
        registry.register(_EngineCollector(engine))
        ProcessCollector(registry=registry)
        for outcome in ("stored", "duplicate"):
            self.append_records.labels(outcome)
        for reason in MissingReason:
            self.missing_rows.labels(reason.name.lower())
        for durability in DURABILITIES:
            self.append_seconds.labels(durability)
        for name, value in vars(errors).items():
            if isinstance(value, type) and issubclass(value, errors.TraceStoreError):
                self.errors.labels(name)


USAGE_FAILED_TEXT = (
    "1 while the data disk cannot be asked how full it is; the other gauges of the engine are then absent"
)

USAGE_AGE_TEXT = "How old the gauges of the engine are: 0, or more while catalog or disk do not answer at once"


class _EngineCollector(Collector):
    """Gauges that are read off the engine at scrape time."""

    def __init__(self, engine: Engine) -> None:
        self._usage = LastUsage(engine)

    def collect(self) -> list[Metric]:
        try:
            usage, age = self._usage.get()
        except OSError:
            # The disk cannot even be asked for its free space. The other instruments are more needed than ever.
            return [_gauge("usage_failed", USAGE_FAILED_TEXT, 1)]
        gauges = (
            ("runs", "Runs in the catalog", usage.runs),
            ("partitions", "Partitions in the catalog", usage.partitions),
            ("trajectories", "Trajectories in the catalog", usage.trajectories),
            ("records", "Records in the catalog", usage.records),
            ("disk_bytes", "Bytes of segments on disk", usage.disk_bytes),
            ("disk_free_bytes", "Bytes free on the data disk", usage.disk_free_bytes),
            ("queue_bytes", "Payload accepted and not yet written", usage.queued_bytes),
            ("writes_refused", "1 while writes are refused because of the disk", int(bool(usage.write_refusal))),
            ("deletions_pending", "Deletions asked for and not done", usage.deletions_pending),
            *tier_gauges(usage.tier),
        )
        return [
            _gauge("usage_failed", USAGE_FAILED_TEXT, 0),
            _gauge("usage_age_seconds", USAGE_AGE_TEXT, age),
            *(_gauge(*gauge) for gauge in gauges),
            *storage_counters(usage),
            disk_state_gauge(usage.disk_state),
        ]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"trace_store_{name}", text, value=value)
