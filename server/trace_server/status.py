"""Errors <-> gRPC status codes: one table. The full error travels in the trailing metadata as an ErrorDetail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from trace_store import errors
from trace_store.record import Site
from trace_store.wire import ERROR_METADATA_KEY, error_to_wire

STATUS: dict[type[errors.TraceStoreError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SchemaMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.StaleAttempt: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Sealed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Incomplete: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StorageFailed: grpc.StatusCode.UNAVAILABLE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.FormatError: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.TraceStoreError: grpc.StatusCode.INTERNAL,
}


HOLES_MAX = 256
"""Holes of an Incomplete that travel: 12 bytes each, so that the metadata stays below the 8 KiB that gRPC accepts by
default. The message says how many there are."""


async def abort(
    context: grpc.aio.ServicerContext[object, object], error: errors.TraceStoreError, table: Sequence[Site] = ()
) -> None:
    """End the call with the error's status and its ErrorDetail. Raises CancelledError when the client is gone."""
    detail = error_to_wire(error, table)
    del detail.holes[HOLES_MAX:]
    status = STATUS[errors.public_class(error)]
    try:
        await context.abort(status, str(error), ((ERROR_METADATA_KEY, detail.SerializeToString()),))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
