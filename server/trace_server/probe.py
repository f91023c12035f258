"""``python -m trace_server.probe``: exit 0 if the server of this container serves, 1 and the reason if not.

For health checks of container engines. It reads TRACE_STORE_METRICS like the server and asks ``/health`` there, so it
works with TLS and tokens too.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

from trace_server.http import DEFAULT_METRICS, split_address
from trace_store.errors import InvalidRequest

PROBE_TIMEOUT_S = 5.0

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def probe(metrics_address: str) -> str:
    """An empty string if the server serves, else why not."""
    try:
        host, port = split_address(metrics_address, "metrics")
    except InvalidRequest as error:
        return str(error)
    host = _WILDCARDS.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    # The proxy of the environment is for others; this server is on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"http://{shown}:{port}/health", timeout=PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace").strip()
    except OSError as error:
        return f"no answer from {shown}:{port}: {error}"
    return ""


if __name__ == "__main__":
    reason = probe(os.environ.get("TRACE_STORE_METRICS", DEFAULT_METRICS))
    if reason:
        print(reason, file=sys.stderr)
    sys.exit(1 if reason else 0)
