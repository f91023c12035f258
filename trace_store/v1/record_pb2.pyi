from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_UNSPECIFIED: _ClassVar[Form]
    FORM_B1: _ClassVar[Form]
    FORM_B2: _ClassVar[Form]
    FORM_B3: _ClassVar[Form]
    FORM_FULL: _ClassVar[Form]

class ScaleType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_TYPE_UNSPECIFIED: _ClassVar[ScaleType]
    SCALE_TYPE_E4M3: _ClassVar[ScaleType]
    SCALE_TYPE_E8M0: _ClassVar[ScaleType]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_WRITTEN: _ClassVar[Durability]
    DURABILITY_SYNCED: _ClassVar[Durability]
FORM_UNSPECIFIED: Form
FORM_B1: Form
FORM_B2: Form
FORM_B3: Form
FORM_FULL: Form
SCALE_TYPE_UNSPECIFIED: ScaleType
SCALE_TYPE_E4M3: ScaleType
SCALE_TYPE_E8M0: ScaleType
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_WRITTEN: Durability
DURABILITY_SYNCED: Durability

class Site(_message.Message):
    __slots__ = ("layer", "kind", "width", "block", "scale", "form", "quantizer")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    QUANTIZER_FIELD_NUMBER: _ClassVar[int]
    layer: int
    kind: str
    width: int
    block: int
    scale: ScaleType
    form: Form
    quantizer: str
    def __init__(self, layer: _Optional[int] = ..., kind: _Optional[str] = ..., width: _Optional[int] = ..., block: _Optional[int] = ..., scale: _Optional[_Union[ScaleType, str]] = ..., form: _Optional[_Union[Form, str]] = ..., quantizer: _Optional[str] = ...) -> None: ...

class TokenSpan(_message.Message):
    __slots__ = ("trajectory", "start", "stop", "dest_row")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DEST_ROW_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    start: int
    stop: int
    dest_row: int
    def __init__(self, trajectory: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., dest_row: _Optional[int] = ...) -> None: ...

class Hole(_message.Message):
    __slots__ = ("site", "start", "stop")
    SITE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    site: int
    start: int
    stop: int
    def __init__(self, site: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("run", "partition", "trajectory", "attempt", "tokens", "prompt_tokens", "durability", "server", "segments", "holes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    HOLES_FIELD_NUMBER: _ClassVar[int]
    run: str
    partition: str
    trajectory: str
    attempt: int
    tokens: int
    prompt_tokens: int
    durability: Durability
    server: str
    segments: _containers.RepeatedScalarFieldContainer[str]
    holes: _containers.RepeatedCompositeFieldContainer[Hole]
    def __init__(self, run: _Optional[str] = ..., partition: _Optional[str] = ..., trajectory: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., server: _Optional[str] = ..., segments: _Optional[_Iterable[str]] = ..., holes: _Optional[_Iterable[_Union[Hole, _Mapping]]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("type", "message", "argument", "holes")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    HOLES_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    argument: str
    holes: _containers.RepeatedCompositeFieldContainer[Hole]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., argument: _Optional[str] = ..., holes: _Optional[_Iterable[_Union[Hole, _Mapping]]] = ...) -> None: ...
