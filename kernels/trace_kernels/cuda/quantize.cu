// Quantizing rows: the exact mode of trace_store.codebook.quantize.
//
//     amax_rows       max |x| over finite elements, for the tensor scale
//     quantize_rows   x -> record rows (planes or whole codes), block scales, decode scale
//
// A block that holds NaN or infinity gets a NaN scale byte (0x7F, 255), whatever the position, and its codes are
// unspecified: a reader refuses it, and nothing downstream takes it for numbers.
//
// TS_BITS as in guided_round.cu, 1 to 4.
#include "blocks.cuh"

#ifndef TS_THREADS
#define TS_THREADS 256
#endif
#ifndef TS_FLIGHT
#define TS_FLIGHT 2  // pieces a thread loads before it quantizes the first
#endif

struct Quantizing {
  const ts_u8* x;
  ts_u8* planes;              // [T, b, W / 8] or [T, W / 2]
  ts_u8* scales;              // [T, W / TS_BLOCK]
  const float* tensor_scale;  // decode scale, or null: from *amax
  const ts_u32* amax;         // bits of max |x|
  float* decode;              // receives 1 / encode when tensor_scale is null
  ts_u64 x_stride;            // elements from row to row; 0: rows follow each other
  ts_u32 pieces;              // T * W / 16, below 2^31
  ts_u32 scale_stride;        // 0: one tensor scale, 1: one per row
  rows::Divisor pieces_a_row;
};

const int PIECE = 16;  // elements of a thread's piece: a whole NVFP4 block, half an MXFP4 one
const int LANES_A_BLOCK = TS_BLOCK / PIECE;

TS_FN float encode_of(const Quantizing& p, ts_u32 row) {
#if TS_E8M0
  return 1.0f;
#else
  if (p.tensor_scale) return e2m1::encode_scale_of(__ldg(p.tensor_scale + row * p.scale_stride));
  return e2m1::encode_scale(e2m1::of_bits(*p.amax));
#endif
}

// Magnitude indices of a unit, one a nibble, element i at bit 4 i.
TS_FN ts_u32 magnitude_nibbles(const rows::Unit& x, float multiplier) {
  ts_u32 sum = 0;
#pragma unroll
  for (int i = rows::UNIT - 1; i >= 0; i--) {
    float a = e2m1::magnitude(e2m1::multiply(rows::element(x, i), multiplier));
    sum = sum * 16 + e2m1::bits_of(e2m1::nearest_magic(a));
  }
  // Each term carries the exponent of 2^23, 0x4B000000; all but those of elements 0 and 1 leave the word.
  return sum - (0x4B000000u + 0xB0000000u);
}

// Bit j of every nibble in the top byte. The product lines four pairs of bits up there; no two of its terms meet.
TS_FN ts_u32 gather_bit(ts_u32 nibbles, int j) {
  ts_u32 t = (nibbles >> j) & 0x11111111u;
  t = (t | t >> 3) & 0x03030303u;
  return t * 0x01041040u;
}

TS_FN void store_codes(const Quantizing& p, ts_u32 piece, const rows::Unit* x, float multiplier) {
  ts_u32 first = magnitude_nibbles(x[0], multiplier), second = magnitude_nibbles(x[1], multiplier);
#if TS_BITS == 4
  first |= rows::sign_nibbles(x[0]), second |= rows::sign_nibbles(x[1]);
  ((uint2*)p.planes)[piece] = make_uint2(first, second);
#else
  ts_u64 at = piece;
  ts_u32 pieces_a_row = p.pieces_a_row.divisor;
  if (TS_BITS > 1) at += (ts_u64)rows::quotient(piece, p.pieces_a_row) * (TS_BITS - 1) * pieces_a_row;
#pragma unroll
  for (int j = 0; j < TS_BITS; j++)
    ((ts_u16*)p.planes)[at + j * pieces_a_row] = (ts_u16)__byte_perm(gather_bit(first, j), gather_bit(second, j), 0x0073);
#endif
}

TS_FN void load_piece(const Quantizing& p, ts_u32 piece, rows::Unit* x) {
  ts_u64 element = (ts_u64)piece * PIECE;
  if (p.x_stride) {
    ts_u32 row = rows::quotient(piece, p.pieces_a_row);
    element = row * p.x_stride + (piece - row * p.pieces_a_row.divisor) * PIECE;
  }
  x[0] = rows::load_unit(p.x, element);
  x[1] = rows::load_unit(p.x, element + rows::UNIT);
}

// A thread takes whole pieces, so that a block's scale is computed once (twice for MXFP4) rather than by every 8 elements.
extern "C" __global__ void __launch_bounds__(TS_THREADS) quantize_rows(const Quantizing p) {
  const ts_u32 first = blockIdx.x * (TS_THREADS * TS_FLIGHT) + threadIdx.x;
  rows::Unit x[TS_FLIGHT][2];
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    ts_u32 piece = first + k * TS_THREADS;
    x[k][0] = x[k][1] = rows::Unit();
    if (piece < p.pieces) load_piece(p, piece, x[k]);
  }
  float encode = encode_of(p, p.scale_stride ? rows::quotient(min(first, p.pieces - 1), p.pieces_a_row) : 0);
  e2m1::Encoding e = e2m1::encoding_of(encode);
  if (p.decode && first == 0) *p.decode = e.inverse;
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    // Lanes past the end carry zeros through the exchange; a block's lanes are never split, so they meddle with none.
    ts_u32 piece = first + k * TS_THREADS;
    ts_u32 largest = max(rows::largest_magnitude(x[k][0]), rows::largest_magnitude(x[k][1]));
    if (LANES_A_BLOCK == 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    if (piece >= p.pieces) continue;
    if (k > 0 && p.scale_stride) e = e2m1::encoding_of(encode_of(p, rows::quotient(piece, p.pieces_a_row)));
    float multiplier;
    ts_u32 byte = blocks::scale_of(largest, e, &multiplier);
    if (piece % LANES_A_BLOCK == 0) p.scales[piece / LANES_A_BLOCK] = (ts_u8)byte;
    store_codes(p, piece, x[k], multiplier);
  }
}

struct Maximum {
  const ts_u8* x;
  ts_u32* amax;  // holds 0 before the launch
  ts_u64 x_stride;
  ts_u32 units;
  rows::Divisor units_a_row;
};

extern "C" __global__ void __launch_bounds__(TS_THREADS) amax_rows(const Maximum p) {
  ts_u32 largest = 0;
  for (ts_u32 unit = blockIdx.x * TS_THREADS + threadIdx.x; unit < p.units; unit += gridDim.x * TS_THREADS) {
    ts_u32 row = rows::quotient(unit, p.units_a_row);
    rows::Unit x = rows::load_unit(p.x, row * p.x_stride + (unit - row * p.units_a_row.divisor) * rows::UNIT);
    ts_u32 found = rows::largest_magnitude(x);
    if (found >= e2m1::INFINITY_BITS) {
      found = 0;
#pragma unroll
      for (int i = 0; i < rows::UNIT; i++) {
        ts_u32 bits = e2m1::bits_of(e2m1::magnitude(rows::element(x, i)));
        if (bits < e2m1::INFINITY_BITS) found = max(found, bits);
      }
    }
    largest = max(largest, found);
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(p.amax, largest);
}
