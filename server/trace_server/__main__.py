"""``python -m trace_server``: the same as ``trace-store serve``."""

import sys

from trace_server.serve import command

sys.exit(command(sys.argv[1:]))
