"""A chunk: the records of one stream message, as they travel and as the engine takes them.

    groups         one per trajectory attempt and token span, each with a record for every one of its sites
    codes          codes of all records, groups in order, sites in order, rows of tokens start to stop
    scales         block scales of all records, same order
    tensor_scales  little-endian float32, one a record or one a token, same order

``check_chunk`` proves that a chunk fits the run's site table before anything of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trace_store.checksum import group_checksums, record_checksum, trajectory_seed
from trace_store.errors import DataLoss, InvalidRequest
from trace_store.limits import TOKENS_MAX
from trace_store.record import Site, check_attempt, check_int, check_name, has_nan_scale
from trace_store.shape import GroupShape, group_shape


@dataclass(frozen=True)
class RecordGroup:
    """Records of one trajectory attempt over tokens [start, stop), one a site."""

    trajectory: str
    attempt: int
    policy_version: int
    start: int
    stop: int
    sites: tuple[int, ...]
    scale_per_token: tuple[bool, ...]
    checksums: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Groups and their bytes; see the module docstring for the order."""

    groups: tuple[RecordGroup, ...]
    codes: memoryview
    scales: memoryview
    tensor_scales: memoryview

    @property
    def payload_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scales.nbytes

    @property
    def records(self) -> int:
        return sum(len(group.sites) for group in self.groups)


class RecordView(NamedTuple):
    """One record of a chunk: its place in the group and views of its bytes."""

    group: RecordGroup
    position: int
    codes: memoryview
    scales: memoryview
    tensor_scales: memoryview


def shape_of(group: RecordGroup, table: Sequence[Site]) -> GroupShape:
    """Shape of a group that names sites of the table."""
    return group_shape(table, group.sites, group.scale_per_token, group.stop - group.start)


def cut_chunk(groups: tuple[RecordGroup, ...], payload: memoryview, table: Sequence[Site]) -> Chunk:
    """Cut a payload into a checked chunk.

    Raises:
        InvalidRequest: a key, size or scale is out of bounds; names the argument.
        DataLoss: a record does not match the checksum it came with.
    """
    codes = scales = tensor = 0
    for group in groups:
        _check_group(group, len(table))
        shape = shape_of(group, table)
        codes, scales = codes + shape.code_bytes, scales + shape.scale_bytes
        tensor += shape.tensor_bytes
    if payload.nbytes != codes + scales + tensor:
        raise InvalidRequest(
            f"payload does not fit its groups, expected={codes + scales + tensor} bytes={payload.nbytes}",
            argument="payload",
        )
    return Chunk(groups, payload[:codes], payload[codes : codes + scales], payload[codes + scales :])


def check_chunk(chunk: Chunk, run: str, partition: str, table: Sequence[Site]) -> None:
    """Check values and checksums of every record; runs on a worker thread, since it reads all bytes once.

    Raises:
        InvalidRequest: a scale is NaN, a tensor scale infinite or negative.
        DataLoss: a record does not match its checksum.
    """
    _check_tensor_scales(chunk.tensor_scales)
    shapes = [shape_of(group, table) for group in chunk.groups]
    # Most chunks hold one scale type: two memchr over all scales; a mixed one is looked at record by record.
    if any(has_nan_scale(chunk.scales, scale) for scale in frozenset().union(*(s.scale_types for s in shapes))):
        _check_scales(chunk, table)
    code = scale = tensor = 0
    seed, seeded = 0, ""
    for group, shape in zip(chunk.groups, shapes, strict=True):
        if group.trajectory != seeded:
            seed, seeded = trajectory_seed(run, partition, group.trajectory), group.trajectory
        code_end, scale_end = code + shape.code_bytes, scale + shape.scale_bytes
        tensor_end = tensor + shape.tensor_bytes
        found = group_checksums(
            seed,
            group.attempt,
            group.policy_version,
            group.start,
            group.stop,
            shape.key_parts,
            shape.parts,
            chunk.codes[code:code_end],
            chunk.scales[scale:scale_end],
            chunk.tensor_scales[tensor:tensor_end],
        )
        if found != list(group.checksums):
            wrong = next(n for n, (a, b) in enumerate(zip(found, group.checksums, strict=True)) if a != b)
            raise DataLoss(
                f"a record does not match its checksum on arrival, site={table[group.sites[wrong]].name}"
                f" trajectory={group.trajectory!r} tokens=[{group.start}, {group.stop})"
            )
        code, scale, tensor = code_end, scale_end, tensor_end


_INFINITE_BITS = 0x7F80_0000


def _check_tensor_scales(tensor_scales: memoryview) -> None:
    bits = np.frombuffer(tensor_scales[: tensor_scales.nbytes // 4 * 4], np.uint32)
    # Bits of finite floats from 0 up are smaller; so one pass decides nearly always. What is left may be -0.
    if not bits.size or int(bits.max()) < _INFINITE_BITS:
        return
    values = bits.view("<f4")
    if not np.isfinite(values).all() or bool((values < 0).any()):
        raise InvalidRequest("tensor_scale must be finite and >= 0", argument="tensor_scale")


def _check_scales(chunk: Chunk, table: Sequence[Site]) -> None:
    """Refuse a NaN among the scales, by its record."""
    for record in iterate_records(chunk, table):
        group, site = record.group, table[record.group.sites[record.position]]
        if has_nan_scale(record.scales, site.scale):
            raise InvalidRequest(
                f"scales hold a NaN byte, site={site.name} trajectory={group.trajectory!r}"
                f" tokens=[{group.start}, {group.stop})",
                argument="scales",
            )


def checksum_of(record: RecordView, seed: int) -> int:
    """Checksum of a record of a chunk."""
    group, position = record.group, record.position
    return record_checksum(
        seed,
        group.attempt,
        group.policy_version,
        group.sites[position],
        group.start,
        group.stop,
        record.codes,
        record.scales,
        record.tensor_scales,
    )


def iterate_records(chunk: Chunk, table: Sequence[Site]) -> Iterator[RecordView]:
    """The records of a chunk in order, without copying."""
    code = scale = tensor = 0
    for group in chunk.groups:
        tokens = group.tokens
        for position, (number, per_token) in enumerate(zip(group.sites, group.scale_per_token, strict=True)):
            site = table[number]
            code_end = code + tokens * site.code_bytes
            scale_end = scale + tokens * site.scale_bytes
            tensor_end = tensor + 4 * (tokens if per_token else 1)
            yield RecordView(
                group,
                position,
                chunk.codes[code:code_end],
                chunk.scales[scale:scale_end],
                chunk.tensor_scales[tensor:tensor_end],
            )
            code, scale, tensor = code_end, scale_end, tensor_end


def _check_group(group: RecordGroup, sites: int) -> None:
    check_name(group.trajectory, "trajectory")
    check_attempt(group.attempt, group.policy_version)
    check_int(group.start, "start", 0, TOKENS_MAX)
    check_int(group.stop, "stop", 0, TOKENS_MAX)
    if group.stop <= group.start:
        raise InvalidRequest(f"span is empty or negative, start={group.start} stop={group.stop}", argument="stop")
    if not group.sites or len(set(group.sites)) != len(group.sites):
        raise InvalidRequest("a group names each site once and one site at least", argument="sites")
    if max(group.sites) >= sites:
        raise InvalidRequest(f"unknown site number, site={max(group.sites)} sites={sites}", argument="sites")
    if not len(group.sites) == len(group.scale_per_token) == len(group.checksums):
        raise InvalidRequest("sites, scale_per_token and checksums differ in length", argument="sites")
