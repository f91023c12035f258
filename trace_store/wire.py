"""Protobuf messages <-> values of this package. The one module of the core that knows trace_store.v1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from trace_store import errors, frame
from trace_store.chunk import Chunk, RecordGroup, cut_chunk
from trace_store.errors import InvalidRequest, TraceStoreError
from trace_store.limits import GROUPS_MAX
from trace_store.record import DURABILITIES, Receipt, Site, TokenSpan
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

SERVICE = "trace_store.v1.TraceStoreService"
ERROR_METADATA_KEY = "trace-store-error-bin"

_FORMS = {"b1": 1, "b2": 2, "b3": 3, "full": 4}
_SCALES = {"e4m3": 1, "e8m0": 2}
_FORM_NAMES = {number: name for name, number in _FORMS.items()}
_SCALE_NAMES = {number: name for name, number in _SCALES.items()}


def site_to_wire(site: Site) -> Any:
    return record_pb2.Site(
        layer=site.layer,
        kind=site.kind,
        width=site.width,
        block=site.block,
        scale=_SCALES[site.scale],  # type: ignore[arg-type]
        form=_FORMS[site.form],  # type: ignore[arg-type]
        quantizer=site.quantizer,
    )


def site_from_wire(message: Any) -> Site:
    """A validated site. Raises InvalidRequest."""
    return Site(
        layer=message.layer,
        kind=message.kind,
        width=message.width,
        block=message.block,
        scale=_SCALE_NAMES.get(message.scale, f"unknown({message.scale})"),
        form=_FORM_NAMES.get(message.form, f"unknown({message.form})"),
        quantizer=message.quantizer,
    )


def durability_to_wire(name: str) -> int:
    return DURABILITIES.index(name) + 1


def durability_from_wire(number: int) -> str:
    """Raises InvalidRequest for the unspecified or an unknown level."""
    if not 1 <= number <= len(DURABILITIES):
        raise InvalidRequest(f"durability must be one of {DURABILITIES}, got={number}", argument="durability")
    return DURABILITIES[number - 1]


def span_from_wire(message: Any) -> TokenSpan:
    return TokenSpan(message.trajectory, message.start, message.stop, message.dest_row)


def holes_to_wire(holes: Iterable[tuple[str, int, int]], numbers: dict[str, int]) -> list[Any]:
    return [record_pb2.Hole(site=numbers[name], start=start, stop=stop) for name, start, stop in holes]


def holes_from_wire(messages: Iterable[Any], table: Sequence[Site]) -> tuple[tuple[str, int, int], ...]:
    return tuple((table[hole.site].name, hole.start, hole.stop) for hole in messages)


def site_numbers(table: Sequence[Site]) -> dict[str, int]:
    """Site name -> number."""
    return {site.name: number for number, site in enumerate(table)}


def receipt_to_wire(receipt: Receipt, table: Sequence[Site]) -> Any:
    return record_pb2.Receipt(
        run=receipt.run,
        partition=receipt.partition,
        trajectory=receipt.trajectory,
        attempt=receipt.attempt,
        tokens=receipt.tokens,
        prompt_tokens=receipt.prompt_tokens,
        durability=durability_to_wire(receipt.durability),  # type: ignore[arg-type]
        server=receipt.server,
        segments=receipt.segments,
        holes=holes_to_wire(receipt.holes, site_numbers(table)),
    )


def receipt_from_wire(message: Any, table: Sequence[Site]) -> Receipt:
    return Receipt(
        run=message.run,
        partition=message.partition,
        trajectory=message.trajectory,
        attempt=message.attempt,
        tokens=message.tokens,
        prompt_tokens=message.prompt_tokens,
        durability=durability_from_wire(message.durability),
        server=message.server,
        segments=tuple(message.segments),
        holes=holes_from_wire(message.holes, table),
    )


# -- errors


def error_to_wire(error: TraceStoreError, table: Sequence[Site] = ()) -> Any:
    """ErrorDetail of an error; holes need the run's site table."""
    holes = getattr(error, "holes", ())
    return record_pb2.ErrorDetail(
        type=errors.public_class(error).__name__,
        message=str(error),
        argument=getattr(error, "argument", ""),
        holes=holes_to_wire(holes, site_numbers(table)) if table else [],
    )


def error_from_wire(detail: Any, table: Sequence[Site] = ()) -> TraceStoreError:
    """The error that the server raised; an unknown type becomes TraceStoreError."""
    kind: Any = getattr(errors, detail.type, TraceStoreError)
    if not (isinstance(kind, type) and issubclass(kind, TraceStoreError)):
        kind = TraceStoreError
    details: dict[str, Any] = {}
    if issubclass(kind, InvalidRequest):
        details["argument"] = detail.argument
    elif issubclass(kind, errors.Incomplete):
        details["holes"] = holes_from_wire(detail.holes, table) if table else ()
    error: TraceStoreError = kind(detail.message, **details)
    return error


# -- bulk frames


def append_open_frame(run: str, partition: str, durability: str) -> bytes:
    header = service_pb2.AppendHeader(
        open=service_pb2.AppendOpen(
            run=run,
            partition=partition,
            durability=durability_to_wire(durability),  # type: ignore[arg-type]
            batched=True,
        )
    )
    return frame.encode(header.SerializeToString(), ())


def append_frame(sequence: int, groups: Sequence[RecordGroup], parts: Sequence[frame.Buffer]) -> bytes:
    """AppendRequest of records; ``parts`` are all codes, all scales, all tensor scales, in order."""
    return frame.encode(_append_header(sequence, groups).SerializeToString(), parts)


def append_prefix(sequence: int, groups: Sequence[RecordGroup], size: int) -> bytes:
    """What comes before a payload of ``size`` bytes in an AppendRequest, as long whatever the checksums."""
    return frame.prefix(_append_header(sequence, groups).SerializeToString(), size)


def append_arena_frame(sequence: int, groups: Sequence[RecordGroup], arena: bytes, offset: int, length: int) -> bytes:
    """AppendRequest of records whose payload lies in an arena."""
    header = _append_header(sequence, groups)
    header.arena.arena, header.arena.offset_bytes, header.arena.length_bytes = arena, offset, length
    return frame.encode(header.SerializeToString(), ())


def renumber_append(message: bytes, sequence: int) -> bytes:
    """The same AppendRequest for another stream."""
    encoded, payload = frame.decode(message)
    header = _parse(service_pb2.AppendHeader, encoded)
    header.sequence = sequence
    return frame.encode(header.SerializeToString(), (payload,))


def _append_header(sequence: int, groups: Sequence[RecordGroup]) -> Any:
    return service_pb2.AppendHeader(
        sequence=sequence,
        groups=[
            service_pb2.RecordGroup(
                trajectory=group.trajectory,
                attempt=group.attempt,
                policy_version=group.policy_version,
                start=group.start,
                stop=group.stop,
                sites=group.sites,
                scale_per_token=group.scale_per_token,
                checksums=group.checksums,
            )
            for group in groups
        ],
    )


def cut_append(message: bytes) -> list[tuple[bytes, memoryview]]:
    """Encoded AppendHeader and payload of each request in a message. Raises InvalidRequest."""
    return frame.decode_all(message)


def append_header(encoded: bytes) -> Any:
    """AppendHeader of a request. Raises InvalidRequest."""
    return _parse(service_pb2.AppendHeader, encoded)


def parse_append(message: bytes) -> list[tuple[Any, memoryview]]:
    """AppendHeader and payload of each request in a message. Raises InvalidRequest."""
    return [(append_header(encoded), payload) for encoded, payload in cut_append(message)]


def chunk_from_wire(header: Any, payload: memoryview, table: Sequence[Site]) -> Chunk:
    """A chunk whose sizes and keys are checked. Raises InvalidRequest."""
    if len(header.groups) > GROUPS_MAX:
        raise InvalidRequest(
            f"a request holds at most {GROUPS_MAX} groups, got={len(header.groups)}", argument="groups"
        )
    groups = tuple(
        RecordGroup(
            trajectory=group.trajectory,
            attempt=group.attempt,
            policy_version=group.policy_version,
            start=group.start,
            stop=group.stop,
            sites=tuple(group.sites),
            scale_per_token=tuple(group.scale_per_token),
            checksums=tuple(group.checksums),
        )
        for group in header.groups
    )
    if not groups:
        raise InvalidRequest("a message holds one group at least", argument="groups")
    return cut_chunk(groups, payload, table)


def parse_read(message: bytes) -> tuple[Any, memoryview]:
    """ReadHeader and payload of a frame. Raises InvalidRequest."""
    header, payload = frame.decode(message)
    return _parse(service_pb2.ReadHeader, header), payload


def _parse(kind: Any, encoded: bytes) -> Any:
    try:
        return kind.FromString(encoded)
    except DecodeError as error:
        raise InvalidRequest(f"malformed frame header, cause={error}", argument="frame") from None
