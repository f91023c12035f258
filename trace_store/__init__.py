"""trace-store: storage of guidance records between FP4 rollouts and training."""

from trace_store.errors import TraceStoreError
from trace_store.record import GuidanceRecord, Receipt, Site, TokenSpan

__all__ = ["GuidanceRecord", "Receipt", "Site", "TokenSpan", "TraceStoreError"]
