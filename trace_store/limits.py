"""Bounds that every part of the product agrees on. Each is checked where the value enters."""

from __future__ import annotations

ID_BYTES_MAX = 512
"""Length of a run, partition or trajectory name in UTF-8 bytes."""

SITES_MAX = 4096
"""Sites of one run; a 128-layer model with moe_in, k and v has 384."""

WIDTH_MAX = 65_536
"""Elements of one token row at one site."""

TOKENS_MAX = 2**31 - 1
"""Largest token position, exclusive."""

ATTEMPT_MAX = 2**31 - 1
POLICY_VERSION_MAX = 2**63 - 1

FRAME_BYTES = 1 << 20
"""Target payload of an append request outside an arena, and where records are cut: a reader of a few tokens reads and
verifies whole records. Messages are longer: up to 4 MiB of requests (``stream.BATCH_BYTES_MAX``), reads of 2 MiB."""

FRAME_BYTES_MAX = 16 << 20
"""Largest bulk message that either side accepts, header included."""

FRAMES_MAX = 1024
"""Requests in one message of an append stream: half a million empty ones would hold the event loop for seconds."""

GROUPS_MAX = 65_536
"""Record groups of one append request."""

SPANS_MAX = 65_536
"""Spans of one read."""

SPAN_SITES_MAX = 1 << 22
"""Spans times sites of one read: 60 sites of as many spans as there may be. A plan, and what it finds missing, takes
50 to 100 bytes and a microsecond or two for each."""

PING_INTERVAL_S = 5.0
"""How often a client with a call under way asks whether the server's process still runs. A server takes pings twice as
often: gRPC's own rule, one in five minutes, would end the connection."""
