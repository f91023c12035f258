"""Instruments of retention, the disk's marks and the object tier, read off the engine at scrape time."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trace_store.engine import Usage
from trace_store.gate import STATES
from trace_store.keeper import RULES
from trace_store.tier.tier import TierStatus


def tier_gauges(tier: TierStatus) -> tuple[tuple[str, str, float], ...]:
    """Name, text and value of each; all zero without an object store."""
    return (
        ("upload_queue_segments", "Sealed segments that wait for their upload", tier.waiting),
        ("upload_queue_bytes", "Bytes of sealed segments that wait for their upload", tier.waiting_bytes),
        ("upload_lag_seconds", "How long the oldest segment has been waiting for its upload", tier.lag_s),
        ("upload_stuck_segments", "Waiting segments whose upload failed many times in a row", tier.stuck),
        ("object_store_failing", "1 while the object store does not answer as it should", int(bool(tier.error))),
        ("object_store_joined", "1 once the object store has answered since the start", int(tier.joined)),
        ("remote_segments", "Segments in the catalog that are only in the object store", tier.remote_segments),
    )


def storage_counters(usage: Usage) -> list[Metric]:
    """Counters since the start."""
    tier = usage.tier
    plain = (
        ("uploaded_segments", "Segments uploaded", tier.uploaded),
        ("uploaded_bytes", "Bytes of segments uploaded", tier.uploaded_bytes),
        ("cached_segments", "Segments fetched from the object store to the local disk", tier.cached),
        ("cached_bytes", "Bytes of segments fetched to the local disk", tier.cached_bytes),
        ("evicted_segments", "Uploaded segments whose local copy was removed", tier.evicted),
        ("evicted_bytes", "Bytes of local copies removed", tier.evicted_bytes),
        ("vanished_segments", "Uploaded segments that another server released", tier.vanished),
        ("appends_refused_full", "Appends refused because the disk is nearly full", usage.appends_refused),
        ("appends_slowed_seconds", "Time that appends were held back on a filling disk", usage.slowed_seconds),
    )
    families: list[Metric] = [CounterMetricFamily(f"trace_store_{n}", text, value=value) for n, text, value in plain]
    failures = CounterMetricFamily("trace_store_upload_failures", "Uploads that failed, by outcome", labels=["outcome"])
    unclear = tier.upload_unknown
    for outcome, count in (
        ("refused", tier.upload_failures - unclear),
        ("unknown", unclear),
        ("conflict", tier.upload_conflicts),
    ):
        failures.add_metric([outcome], count)
    released = CounterMetricFamily(
        "trace_store_retention_partitions", "Partitions released by retention, by rule", labels=["rule"]
    )
    for rule in RULES:
        released.add_metric([rule], getattr(usage.retention, rule))
    return [*families, failures, released]


def disk_state_gauge(state: str) -> Metric:
    """One series a state, 1 for the present one."""
    family = GaugeMetricFamily(
        "trace_store_disk_state", "Room on the data disk, 1 for the state it is in", labels=["state"]
    )
    for name in STATES:
        family.add_metric([name], int(name == state))
    return family
