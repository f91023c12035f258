"""Where the codes of a record batch start in the file: at a multiple of 64 bytes.

Clients hold codes at such addresses, and the kernel's copy (``rep movsb``) is slower between places that differ modulo
64: reads of 32 KiB pieces took 0.10 CPU s/GiB when they agree and 0.14 when not, writes 0.165 and 0.19, and 0.42 when
the file's place lies 8 bytes behind the memory's modulo a page. Arrow pads to 8. What is left is made up in the header
of the message, by custom metadata that says nothing; readers need not know.
"""

from __future__ import annotations

import functools

import pyarrow as pa

from trace_store.segment.schema import COLUMNS, FIELDS

ALIGN_BYTES = 64

_ARROW_BYTES = 8
"""Messages start at its multiples, headers and buffers fill them."""

_CODES = [field.name for field in FIELDS].index("codes")

_PADS = [pa.KeyValueMetadata({"trace_store.pad": " " * size}) for size in range(0, ALIGN_BYTES, _ARROW_BYTES)]


def lead_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of a batch's body before the first byte of its codes."""
    columns = [batch.column(number) for number in range(_CODES)]
    buffers = [buffer for column in columns for buffer in column.buffers()]
    buffers.append(batch.column(_CODES).buffers()[1])
    return sum(-(-buffer.size // _ARROW_BYTES) * _ARROW_BYTES for buffer in buffers if buffer is not None)


def padding(position: int, lead: int) -> pa.KeyValueMetadata:
    """Custom metadata for a message written at ``position`` whose body has ``lead`` bytes before its codes."""
    codes = position + _header_bytes() + lead
    return _PADS[-codes % ALIGN_BYTES // _ARROW_BYTES]


@functools.cache
def _header_bytes() -> int:
    """Bytes of a record batch message without padding before its body: the same for every batch of these columns."""
    schema = pa.schema(FIELDS)
    row = {name: "x" if kind == pa.string() else b"x" if kind == pa.binary() else 0 for name, kind in COLUMNS}
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(batch, custom_metadata=_PADS[0])
        before = sink.tell()
        stream.write_batch(batch, custom_metadata=_PADS[0])
        message = sink.tell() - before
    body = pa.ipc.MessageReader.open_stream(sink.getvalue())
    body.read_next_message()
    return int(message - body.read_next_message().body.size)
