"""Version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("trace-store")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+source"
