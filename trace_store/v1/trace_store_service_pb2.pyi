from trace_store.v1 import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissingReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISSING_REASON_UNSPECIFIED: _ClassVar[MissingReason]
    MISSING_REASON_UNKNOWN_TRAJECTORY: _ClassVar[MissingReason]
    MISSING_REASON_NOT_SEALED: _ClassVar[MissingReason]
    MISSING_REASON_NOT_RECORDED: _ClassVar[MissingReason]
    MISSING_REASON_DATA_LOSS: _ClassVar[MissingReason]
    MISSING_REASON_STALE: _ClassVar[MissingReason]
    MISSING_REASON_RELEASED: _ClassVar[MissingReason]
    MISSING_REASON_STORAGE_FAILED: _ClassVar[MissingReason]
    MISSING_REASON_NOT_UPLOADED: _ClassVar[MissingReason]
MISSING_REASON_UNSPECIFIED: MissingReason
MISSING_REASON_UNKNOWN_TRAJECTORY: MissingReason
MISSING_REASON_NOT_SEALED: MissingReason
MISSING_REASON_NOT_RECORDED: MissingReason
MISSING_REASON_DATA_LOSS: MissingReason
MISSING_REASON_STALE: MissingReason
MISSING_REASON_RELEASED: MissingReason
MISSING_REASON_STORAGE_FAILED: MissingReason
MISSING_REASON_NOT_UPLOADED: MissingReason

class RegisterRequest(_message.Message):
    __slots__ = ("run", "sites")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    run: str
    sites: _containers.RepeatedCompositeFieldContainer[_record_pb2.Site]
    def __init__(self, run: _Optional[str] = ..., sites: _Optional[_Iterable[_Union[_record_pb2.Site, _Mapping]]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("created",)
    CREATED_FIELD_NUMBER: _ClassVar[int]
    created: bool
    def __init__(self, created: bool = ...) -> None: ...

class DescribeRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class DescribeRunResponse(_message.Message):
    __slots__ = ("sites",)
    SITES_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[_record_pb2.Site]
    def __init__(self, sites: _Optional[_Iterable[_Union[_record_pb2.Site, _Mapping]]] = ...) -> None: ...

class AppendOpen(_message.Message):
    __slots__ = ("run", "partition", "durability", "batched")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    durability: _record_pb2.Durability
    batched: bool
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., durability: _Optional[_Union[_record_pb2.Durability, str]] = ..., batched: bool = ...) -> None: ...

class RecordGroup(_message.Message):
    __slots__ = ("trajectory", "attempt", "policy_version", "start", "stop", "sites", "scale_per_token", "checksums")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    SCALE_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    attempt: int
    policy_version: int
    start: int
    stop: int
    sites: _containers.RepeatedScalarFieldContainer[int]
    scale_per_token: _containers.RepeatedScalarFieldContainer[bool]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trajectory: _Optional[str] = ..., attempt: _Optional[int] = ..., policy_version: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., sites: _Optional[_Iterable[int]] = ..., scale_per_token: _Optional[_Iterable[bool]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class ArenaRange(_message.Message):
    __slots__ = ("arena", "offset_bytes", "length_bytes")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena: bytes
    offset_bytes: int
    length_bytes: int
    def __init__(self, arena: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class AppendHeader(_message.Message):
    __slots__ = ("sequence", "open", "groups", "arena")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    open: AppendOpen
    groups: _containers.RepeatedCompositeFieldContainer[RecordGroup]
    arena: ArenaRange
    def __init__(self, sequence: _Optional[int] = ..., open: _Optional[_Union[AppendOpen, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[RecordGroup, _Mapping]]] = ..., arena: _Optional[_Union[ArenaRange, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: AppendHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[AppendHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("sequence", "stored", "duplicates", "error", "credit_bytes", "released_through", "batched", "further")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELEASED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: int
    duplicates: int
    error: _record_pb2.ErrorDetail
    credit_bytes: int
    released_through: int
    batched: bool
    further: _containers.RepeatedCompositeFieldContainer[AppendResponse]
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[int] = ..., duplicates: _Optional[int] = ..., error: _Optional[_Union[_record_pb2.ErrorDetail, _Mapping]] = ..., credit_bytes: _Optional[int] = ..., released_through: _Optional[int] = ..., batched: bool = ..., further: _Optional[_Iterable[_Union[AppendResponse, _Mapping]]] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("run", "partition", "trajectory", "attempt", "tokens", "prompt_tokens", "allow_holes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_HOLES_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    trajectory: str
    attempt: int
    tokens: int
    prompt_tokens: int
    allow_holes: bool
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., trajectory: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., allow_holes: bool = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: _record_pb2.Receipt
    def __init__(self, receipt: _Optional[_Union[_record_pb2.Receipt, _Mapping]] = ...) -> None: ...

class ReadTarget(_message.Message):
    __slots__ = ("arena", "rows", "codes_offsets", "scales_offsets", "tensor_scales_offsets")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CODES_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SCALES_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SCALES_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    arena: bytes
    rows: int
    codes_offsets: _containers.RepeatedScalarFieldContainer[int]
    scales_offsets: _containers.RepeatedScalarFieldContainer[int]
    tensor_scales_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arena: _Optional[bytes] = ..., rows: _Optional[int] = ..., codes_offsets: _Optional[_Iterable[int]] = ..., scales_offsets: _Optional[_Iterable[int]] = ..., tensor_scales_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("run", "partition", "spans", "sites", "include_open", "policy_version_min", "target", "name_stored")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_OPEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_STORED_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    spans: _containers.RepeatedCompositeFieldContainer[_record_pb2.TokenSpan]
    sites: _containers.RepeatedScalarFieldContainer[int]
    include_open: bool
    policy_version_min: int
    target: ReadTarget
    name_stored: bool
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_record_pb2.TokenSpan, _Mapping]]] = ..., sites: _Optional[_Iterable[int]] = ..., include_open: bool = ..., policy_version_min: _Optional[int] = ..., target: _Optional[_Union[ReadTarget, _Mapping]] = ..., name_stored: bool = ...) -> None: ...

class MissingRows(_message.Message):
    __slots__ = ("span", "site", "start", "stop", "reason")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    span: int
    site: int
    start: int
    stop: int
    reason: MissingReason
    def __init__(self, span: _Optional[int] = ..., site: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., reason: _Optional[_Union[MissingReason, str]] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("sites", "dest_rows", "rows", "policy_versions", "missing", "stored", "attempts", "versions")
    SITES_FIELD_NUMBER: _ClassVar[int]
    DEST_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedScalarFieldContainer[int]
    dest_rows: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    policy_versions: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedCompositeFieldContainer[MissingRows]
    stored: StoredPieces
    attempts: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sites: _Optional[_Iterable[int]] = ..., dest_rows: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., policy_versions: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[_Union[MissingRows, _Mapping]]] = ..., stored: _Optional[_Union[StoredPieces, _Mapping]] = ..., attempts: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class StoredPieces(_message.Message):
    __slots__ = ("segments", "segment", "index_rows", "sites", "skip", "rows", "dest_rows", "spans")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INDEX_ROWS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DEST_ROWS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[str]
    segment: _containers.RepeatedScalarFieldContainer[int]
    index_rows: _containers.RepeatedScalarFieldContainer[int]
    sites: _containers.RepeatedScalarFieldContainer[int]
    skip: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    dest_rows: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[str]] = ..., segment: _Optional[_Iterable[int]] = ..., index_rows: _Optional[_Iterable[int]] = ..., sites: _Optional[_Iterable[int]] = ..., skip: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., dest_rows: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class AttachArenaRequest(_message.Message):
    __slots__ = ("size_bytes", "secret")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    secret: bytes
    def __init__(self, size_bytes: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class AttachArenaResponse(_message.Message):
    __slots__ = ("name", "size_bytes", "owner_uid", "arena")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    owner_uid: int
    arena: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., owner_uid: _Optional[int] = ..., arena: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run", "partition", "trajectories")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    trajectories: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., trajectories: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("run", "partition", "after")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    after: str
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("entries", "more")
    class Entry(_message.Message):
        __slots__ = ("name", "trajectories", "records", "disk_bytes", "attempt", "sealed", "tokens", "prompt_tokens")
        NAME_FIELD_NUMBER: _ClassVar[int]
        TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
        RECORDS_FIELD_NUMBER: _ClassVar[int]
        DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        SEALED_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        name: str
        trajectories: int
        records: int
        disk_bytes: int
        attempt: int
        sealed: bool
        tokens: int
        prompt_tokens: int
        def __init__(self, name: _Optional[str] = ..., trajectories: _Optional[int] = ..., records: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., attempt: _Optional[int] = ..., sealed: bool = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ListResponse.Entry]
    more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[ListResponse.Entry, _Mapping]]] = ..., more: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("server", "version", "runs", "partitions", "trajectories", "records", "disk_bytes", "disk_free_bytes", "queued_bytes", "write_refusal", "disk_state", "object_store", "upload_queue_segments", "upload_queue_bytes", "upload_lag_seconds", "object_store_error", "remote_segments", "data_directory")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DISK_STATE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORE_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_QUEUE_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    REMOTE_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DATA_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    server: str
    version: str
    runs: int
    partitions: int
    trajectories: int
    records: int
    disk_bytes: int
    disk_free_bytes: int
    queued_bytes: int
    write_refusal: str
    disk_state: str
    object_store: str
    upload_queue_segments: int
    upload_queue_bytes: int
    upload_lag_seconds: float
    object_store_error: str
    remote_segments: int
    data_directory: str
    def __init__(self, server: _Optional[str] = ..., version: _Optional[str] = ..., runs: _Optional[int] = ..., partitions: _Optional[int] = ..., trajectories: _Optional[int] = ..., records: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., write_refusal: _Optional[str] = ..., disk_state: _Optional[str] = ..., object_store: _Optional[str] = ..., upload_queue_segments: _Optional[int] = ..., upload_queue_bytes: _Optional[int] = ..., upload_lag_seconds: _Optional[float] = ..., object_store_error: _Optional[str] = ..., remote_segments: _Optional[int] = ..., data_directory: _Optional[str] = ...) -> None: ...
