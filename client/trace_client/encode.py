"""Turn appended arrays into frames of about 1 MiB: cut by tokens, checksummed, joined once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trace_store import wire
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import RecordGroup
from trace_store.errors import InvalidRequest
from trace_store.limits import FRAME_BYTES
from trace_store.record import GuidanceRecord, Site, check_attempt, check_name


def build_records(
    table: Sequence[Site], trajectory: str, start: int, records: Mapping[Site, tuple[Any, Any, Any]]
) -> list[tuple[int, GuidanceRecord]]:
    """Validate one append: site number and record, in table order.

    Raises:
        InvalidRequest: names the argument at fault.
    """
    check_name(trajectory, "trajectory")
    if not isinstance(records, Mapping) or not records:
        raise InvalidRequest("records must map a site to (planes, scales, tensor_scale)", argument="records")
    numbers = {site: number for number, site in enumerate(table)}
    built: list[tuple[int, GuidanceRecord]] = []
    for site, values in records.items():
        number = numbers.get(site)
        if number is None:
            raise InvalidRequest(f"the run has no such site, site={site}", argument="site")
        if not isinstance(values, (tuple, list)) or len(values) != 3:
            raise InvalidRequest(
                f"a record is (planes, scales, tensor_scale), site={site.name} got={type(values).__name__}",
                argument="records",
            )
        built.append((number, GuidanceRecord.build(site, start, *values)))
    built.sort(key=lambda item: item[0])
    lengths = {record.tokens for _, record in built}
    if len(lengths) > 1:
        shown = ", ".join(f"{record.site.name}={record.tokens}" for _, record in built[:4])
        raise InvalidRequest(f"sites of one append differ in tokens: {shown}", argument="planes")
    return built


class Encoder:
    """Frames of one writer: run and partition are fixed, so the checksum seed is kept per trajectory."""

    def __init__(self, run: str, partition: str) -> None:
        self._run, self._partition = run, partition
        self._seed: tuple[str, int] = ("", 0)

    def frames(
        self,
        records: Sequence[tuple[int, GuidanceRecord]],
        trajectory: str,
        attempt: int,
        policy_version: int,
        next_sequence: Any,
    ) -> Iterator[tuple[bytes, int]]:
        """Frames and their payload bytes. ``next_sequence()`` numbers them."""
        check_attempt(attempt, policy_version)
        if self._seed[0] != trajectory:
            self._seed = (trajectory, trajectory_seed(self._run, self._partition, trajectory))
        tokens = records[0][1].tokens
        for part, row_bytes in _split_sites(records):
            step = max(1, FRAME_BYTES // row_bytes)
            for low in range(0, tokens, step):
                high = min(low + step, tokens)
                yield self._frame(part, trajectory, attempt, policy_version, low, high, next_sequence())

    def _frame(
        self,
        records: Sequence[tuple[int, GuidanceRecord]],
        trajectory: str,
        attempt: int,
        policy_version: int,
        low: int,
        high: int,
        sequence: int,
    ) -> tuple[bytes, int]:
        start = records[0][1].start
        codes: list[memoryview] = []
        scales: list[memoryview] = []
        tensors: list[memoryview] = []
        checksums: list[int] = []
        per_token: list[bool] = []
        for number, record in records:
            code = record.codes[low:high].reshape(-1).data
            scale = record.scales[low:high].reshape(-1).data
            values = record.tensor_scale if record.tensor_scale.size == 1 else record.tensor_scale[low:high]
            tensor = memoryview(values.tobytes())
            codes.append(code)
            scales.append(scale)
            tensors.append(tensor)
            per_token.append(len(tensor) == 4 * (high - low))
            checksums.append(
                record_checksum(
                    self._seed[1], attempt, policy_version, number, start + low, start + high, code, scale, tensor
                )
            )
        group = RecordGroup(
            trajectory,
            attempt,
            policy_version,
            start + low,
            start + high,
            tuple(number for number, _ in records),
            tuple(per_token),
            tuple(checksums),
        )
        parts = [*codes, *scales, *tensors]
        return wire.append_frame(sequence, (group,), parts), sum(len(part) for part in parts)


def _split_sites(
    records: Sequence[tuple[int, GuidanceRecord]],
) -> Iterator[tuple[Sequence[tuple[int, GuidanceRecord]], int]]:
    """Runs of records whose token rows fit a frame together, and their row bytes; one run unless the table is huge."""
    low = total = 0
    for position, (_, record) in enumerate(records):
        row_bytes = record.site.code_bytes + record.site.scale_bytes + 4
        if total and total + row_bytes > FRAME_BYTES:
            yield records[low:position], total
            low, total = position, 0
        total += row_bytes
    yield records[low:], total
