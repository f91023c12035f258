"""Code forms: how many bytes of codes one token row takes, and what is in them.

A form is a property of a site. The record, the wire and the segment carry opaque rows whose width this module
defines, so a new form touches this module, one kernel and one section of FORMAT.md.

    form    bits b   code row                                  row shape, W = width
    b1      1        parity plane                              uint8 [1, W / 8]
    b2      2        planes of code bits 0, 1                  uint8 [2, W / 8]
    b3      3        planes of code bits 0, 1, 2 (magnitude)   uint8 [3, W / 8]
    full    4        whole E2M1 codes, low nibble first        uint8 [W / 2]

Element i of a plane is bit ``i % 8`` of byte ``i // 8``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """One way to store the codes of a token row. ``bits`` is the number of code bits per element."""

    name: str
    bits: int

    def row_shape(self, width: int) -> tuple[int, ...]:
        """Shape of one token's code row, without the token axis."""
        return (width // 2,) if self.name == "full" else (self.bits, width // 8)

    def row_bytes(self, width: int) -> int:
        """Bytes of one token's code row."""
        return self.bits * width // 8


FORMS: dict[str, Form] = {name: Form(name, bits) for name, bits in (("b1", 1), ("b2", 2), ("b3", 3), ("full", 4))}
