"""NumPy oracle of the E2M1 code book: quantize, pack and guided rounding, bit for bit what the kernels must produce.

Shapes: T tokens, W elements of a token row, W a multiple of the format's block.

    x              float32, float16 or bfloat16 [T, W]; upcast to float32, in which every step is computed
    codes          uint8 [T, W], 0 to 15: bit 3 sign, bits 2 to 0 index k of the magnitude 0 .5 1 1.5 2 3 4 6
    planes         uint8 [T, b, W / 8], plane j holds code bit j, element i is bit i % 8 of byte i // 8
    full rows      uint8 [T, W / 2], element 2 i in the low nibble of byte i
    scales         uint8 [T, W / block], E4M3 or E8M0 bits, linear order
    tensor_scale   float32 decode scale, a scalar or one per token [T]; value = codeword * block scale * tensor_scale

    format         block   block scale   tensor scale
    nvfp4          16      E4M3          float32
    mxfp4          32      E8M0          1
    mxfp4_block16  16      E8M0          1            (SGLang's fp4_mx_block16 KV cache)

The algorithm is Algorithm 1 of TRACE (arXiv 2610.07767); where the paper leaves a case open, the function that meets
it says what happens. Bad arguments raise ``trace_store.errors.InvalidRequest`` and name the argument.
"""

from __future__ import annotations

from trace_store.codebook.formats import FORMATS, BlockFormat
from trace_store.codebook.grid import MAGNITUDES, RULES
from trace_store.codebook.planes import pack, pack_full, unpack, unpack_full
from trace_store.codebook.quantizer import dequantize, native_round, quantize
from trace_store.codebook.rounding import code_distance, guided_round, rtn_codes, rtn_round
from trace_store.codebook.scales import e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode_floor

__all__ = [
    "FORMATS",
    "MAGNITUDES",
    "RULES",
    "BlockFormat",
    "code_distance",
    "dequantize",
    "e4m3_decode",
    "e4m3_encode",
    "e8m0_decode",
    "e8m0_encode_floor",
    "guided_round",
    "native_round",
    "pack",
    "pack_full",
    "quantize",
    "rtn_codes",
    "rtn_round",
    "unpack",
    "unpack_full",
]
