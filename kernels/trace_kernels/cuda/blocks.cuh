// The scale of a block from its maximum: what quantizing and native rounding share.
//
// A block that holds NaN or infinity gets a NaN scale byte, whatever the position.
#pragma once
#include "rows.cuh"

namespace blocks {

const ts_u32 NAN_BYTE = TS_E8M0 ? 255 : 0x7F;

// Scale byte and multiplier of a block; largest = bits of its max |x|.
TS_FN ts_u32 scale_of(ts_u32 largest, const e2m1::Encoding& e, float* multiplier) {
  float amax = e2m1::of_bits(largest);
#if TS_E8M0
  ts_u32 byte = e2m1::block_scale_e8m0(amax, multiplier);
#else
  ts_u32 byte = e2m1::block_scale_e4m3(amax, e, multiplier);
#endif
  return largest < e2m1::INFINITY_BITS ? byte : NAN_BYTE;
}

// The same value across the lanes that share a block of scales, 8 elements a lane: the maximum over them.
TS_FN ts_u32 maximum(ts_u32 value) {
#pragma unroll
  for (int lane = 1; lane < rows::UNITS_A_BLOCK; lane *= 2) value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  return value;
}

}  // namespace blocks
