"""What a process that was forked from one with open connections may do: nothing with gRPC, and it is told so.

gRPC's threads do not come along into the child of a fork. Its own fork support restarts them there, and with an Append
stream open that killed up to half of the children in our tests with a segmentation fault (grpcio 1.85.3, Python 3.11),
children that never touched gRPC included; the workers of a torch DataLoader are such children. Without that support
children are sound but every call in them would hang, so that calls and new connections raise Unsupported instead.

Start workers that need a connection with ``spawn`` or ``forkserver``. To try gRPC's own support, set
GRPC_ENABLE_FORK_SUPPORT=1 before the first import; then only the parent's connections are refused in the child.
"""

from __future__ import annotations

import os
from typing import NoReturn

from trace_store.errors import Unsupported

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

# Read by gRPC when it is imported; the package imports this module before it imports gRPC. A program that imports grpc
# itself, earlier, keeps gRPC's default and sets the variable itself.
os.environ.setdefault(_VARIABLE, "0")

_connected_pid = 0


def check_connect() -> None:
    """Note that this process uses gRPC.

    Raises:
        Unsupported: its parent did before it forked.
    """
    global _connected_pid
    if _connected_pid not in (0, os.getpid()) and os.environ.get(_VARIABLE, "0").lower() in ("0", "false", "no", ""):
        raise Unsupported(
            "this process was forked after its parent connected, which gRPC does not survive; start workers with spawn"
            f" or connect after the fork, connected_pid={_connected_pid} pid={os.getpid()}"
        )
    _connected_pid = os.getpid()


class OfOneProcess:
    """What belongs to a connection, and so to the process that made it: pickling and copying it is refused."""

    def __reduce__(self) -> NoReturn:
        refuse_pickling("a client, and its writers and readers,")


def refuse_pickling(what: str) -> NoReturn:
    """Raises Unsupported: what belongs to a connection stays in its process."""
    raise Unsupported(
        f"{what} belongs to the process that connected and cannot be pickled or copied; connect in each process: pass"
        " the address to the worker and call trace_client.connect there. A Microbatch can be pickled"
    )


def check_same_process(pid: int) -> None:
    """Raises Unsupported in a child of the process ``pid`` that made a connection."""
    if os.getpid() != pid:
        raise Unsupported(
            "the client was connected before this process was forked; connect in the worker, started with spawn,"
            f" connected_pid={pid} pid={os.getpid()}"
        )
