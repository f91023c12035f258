"""Turn appended arrays into messages: validated, cut by tokens, checksummed. The stream copies the bytes, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import RecordGroup
from trace_store.errors import InvalidRequest
from trace_store.limits import FRAME_BYTES
from trace_store.record import GuidanceRecord, Site, check_attempt, check_name


def build_records(
    numbers: Mapping[Site, int], trajectory: str, start: int, records: Mapping[Site, tuple[Any, Any, Any]]
) -> list[tuple[int, GuidanceRecord]]:
    """Validate one append: site number and record, in the order of the numbers.

    Raises:
        InvalidRequest: names the argument at fault.
    """
    check_name(trajectory, "trajectory")
    if not isinstance(records, Mapping) or not records:
        raise InvalidRequest("records must map a site to (planes, scales, tensor_scale)", argument="records")
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


@dataclass
class Outgoing:
    """Payload of one message, not joined yet: flat views of the caller's arrays, in wire order."""

    groups: list[RecordGroup] = field(default_factory=list)
    codes: list[memoryview] = field(default_factory=list)
    scales: list[memoryview] = field(default_factory=list)
    tensors: list[memoryview] = field(default_factory=list)
    size: int = 0

    @property
    def parts(self) -> list[memoryview]:
        return [*self.codes, *self.scales, *self.tensors]


class Encoder:
    """Messages of one writer: run and partition are fixed, so the checksum seed is kept per trajectory."""

    def __init__(self, run: str, partition: str) -> None:
        self._run, self._partition = run, partition
        self._seed: tuple[str, int] = ("", 0)

    def messages(
        self,
        records: Sequence[tuple[int, GuidanceRecord]],
        trajectory: str,
        attempt: int,
        policy_version: int,
        message_bytes: int = FRAME_BYTES,
    ) -> Iterator[Outgoing]:
        """Messages of up to ``message_bytes``. Records are cut at FRAME_BYTES in any case: a reader of a few tokens
        reads and verifies whole records."""
        check_attempt(attempt, policy_version)
        if self._seed[0] != trajectory:
            self._seed = (trajectory, trajectory_seed(self._run, self._partition, trajectory))
        tokens = records[0][1].tokens
        outgoing = Outgoing()
        for part, row_bytes in _split_sites(records):
            step = max(1, FRAME_BYTES // row_bytes)
            for low in range(0, tokens, step):
                high = min(low + step, tokens)
                if outgoing.groups and outgoing.size + (high - low) * row_bytes > message_bytes:
                    yield outgoing
                    outgoing = Outgoing()
                self._add_group(outgoing, part, trajectory, attempt, policy_version, low, high)
        yield outgoing

    def _add_group(
        self,
        outgoing: Outgoing,
        records: Sequence[tuple[int, GuidanceRecord]],
        trajectory: str,
        attempt: int,
        policy_version: int,
        low: int,
        high: int,
    ) -> None:
        start, seed = records[0][1].start, self._seed[1]
        checksums: list[int] = []
        per_token: list[bool] = []
        for number, record in records:
            code = record.codes[low:high].reshape(-1).data
            scale = record.scales[low:high].reshape(-1).data
            one = record.tensor_scale.size == 1
            tensor = (record.tensor_scale if one else record.tensor_scale[low:high]).view(np.uint8).data
            outgoing.codes.append(code)
            outgoing.scales.append(scale)
            outgoing.tensors.append(tensor)
            outgoing.size += len(code) + len(scale) + len(tensor)
            per_token.append(not one)
            checksums.append(
                record_checksum(seed, attempt, policy_version, number, start + low, start + high, code, scale, tensor)
            )
        outgoing.groups.append(
            RecordGroup(
                trajectory,
                attempt,
                policy_version,
                start + low,
                start + high,
                tuple([number for number, _ in records]),
                tuple(per_token),
                tuple(checksums),
            )
        )


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
