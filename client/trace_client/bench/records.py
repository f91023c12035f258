"""Records of the benchmark: random code bits, and block scales as NVFP4 makes them from Gaussian activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_store import Site

WIDTH, BLOCK = 2048, 16

Rows = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], np.float32]

POOL_BYTES = 64 << 20
"""Distinct payload that appends cycle through: more than the last-level cache holds."""


@dataclass(frozen=True)
class Load:
    """Records of ``tokens`` tokens at ``sites`` sites of width 2048, form b1: 384 bytes a token and site.

    Attributes:
        tokens: tokens of one append.
        appends: appends of one trajectory.
        trajectories: trajectories of one run of a path.
    """

    tokens: int
    appends: int
    trajectories: int
    sites: int = 20

    @property
    def table(self) -> list[Site]:
        return [Site(layer, "moe_in", WIDTH) for layer in range(self.sites)]

    @property
    def append_bytes(self) -> int:
        """Codes and block scales of one append."""
        return self.tokens * self.sites * (WIDTH // 8 + WIDTH // BLOCK)

    @property
    def size(self) -> int:
        """Codes and block scales of one run of a path."""
        return self.append_bytes * self.appends * self.trajectories


def load_of(size: int, sites: int = 20, tokens: int = 128, appends: int = 4) -> Load:
    """About ``size`` bytes, as trajectories of ``appends`` x ``tokens`` tokens."""
    one = Load(tokens, appends, 1, sites)
    return Load(tokens, appends, max(1, round(size / one.size)), sites)


class Pool:
    """Appends to cycle through. ``compressible``: block scales as NVFP4 makes them; else random bytes, which the store
    keeps as they are, so that what a read costs does not depend on how fast the data once came."""

    def __init__(self, load: Load, seed: int = 0, compressible: bool = True) -> None:
        generator = np.random.default_rng(seed)
        count = max(2, min(POOL_BYTES // load.append_bytes, load.appends * load.trajectories))
        table = load.table
        self._appends = [{site: _rows(generator, load.tokens, compressible) for site in table} for _ in range(count)]

    def __getitem__(self, number: int) -> dict[Site, Rows]:
        return self._appends[number % len(self._appends)]

    def joined(self, number: int) -> bytes:
        """The bytes of an append as one value: all codes, then all scales."""
        rows = self[number].values()
        return b"".join([codes.tobytes() for codes, _, _ in rows] + [scales.tobytes() for _, scales, _ in rows])


def _rows(generator: np.random.Generator, tokens: int, compressible: bool) -> Rows:
    codes = generator.integers(0, 256, (tokens, 1, WIDTH // 8), np.uint8)
    if not compressible:
        scales = generator.integers(0, 0x7F, (tokens, WIDTH // BLOCK), np.uint8)
        scales |= generator.integers(0, 2, scales.shape, np.uint8) << 7  # all bytes but the two NaNs
        return codes, scales, np.float32(0.01)
    # The largest of 16 Gaussian magnitudes lies between 0.6 and 4 standard deviations; E4M3 has 8 steps an octave, so
    # that scale bytes spread over some 25 values, 3.4 bits of entropy.
    largest = np.abs(generator.standard_normal((tokens, WIDTH // BLOCK, BLOCK), np.float32)).max(-1)
    scales = np.clip(np.round(8 * np.log2(largest) + 64), 1, 0x7E).astype(np.uint8)
    return codes, scales, np.float32(0.01)
