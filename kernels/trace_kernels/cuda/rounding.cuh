// Rounding one unit of 8 elements, with a record or natively: what the two kernels of guided rounding share.
//
//     TS_BITS   code bits in a record, 0 (rounding to nearest, no record) to 4 (whole codes)
//     TS_RULE   0 paper, 1 cell, 2 bracket
#pragma once
#include "blocks.cuh"

#if TS_BITS > 0
TS_CONSTANT e2m1::Table<TS_BITS, TS_RULE> TABLE;
const int ENTRIES = ((1 << TS_BITS) + 1) * e2m1::STRIDE;
#endif

struct Record {
  ts_u32 plane[3];
};

// Record of a unit. row and column: of the record, column in units; flat = row * units_a_row + column.
TS_FN Record load_record(const ts_u8* planes, ts_u64 flat, ts_u32 row, ts_u32 column, ts_u32 units_a_row) {
  Record record = {{0, 0, 0}};
#if TS_BITS == 4
  record.plane[0] = __ldg((const ts_u32*)planes + flat);
#elif TS_BITS == 1
  record.plane[0] = __ldg(planes + flat);
#elif TS_BITS > 1
  ts_u64 first = (ts_u64)row * TS_BITS * units_a_row + column;
#pragma unroll
  for (int j = 0; j < TS_BITS; j++) record.plane[j] = __ldg(planes + first + j * units_a_row);
#endif
  return record;
}

// A unit's record in one word for the long form, and the code bits of element i in it.
TS_FN ts_u32 record_word(const Record& record) {
  return TS_BITS == 4 ? record.plane[0] : record.plane[0] | record.plane[1] << 8 | record.plane[2] << 16;
}
TS_FN ts_u32 record_bits(ts_u32 word, int i) {
  if (TS_BITS == 4) return (word >> (4 * i)) & 15u;
  ts_u32 bits = 0;
#pragma unroll
  for (int j = 0; j < TS_BITS; j++) bits |= ((word >> (8 * j + i)) & 1u) << j;
  return bits;
}

// base + byte offset of the record's part of the table. A masked bit is multiplied into place and added at once; the
// compiler would make a shift and an addition of it, hence the instruction.
TS_FN ts_u32 add_record(ts_u32 base, const Record& record, int i) {
#if TS_BITS == 4
  return base + ((record.plane[0] >> (4 * i)) & 15u) * (4u * e2m1::STRIDE);
#else
#pragma unroll
  for (int j = 0; j < TS_BITS; j++)
    asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(base) : "r"(record.plane[j] & (1u << i)), "r"((4u * e2m1::STRIDE << j) >> i));
  return base;
#endif
}

TS_FN float look_up(ts_u32 address) {
  float v;
  asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

TS_FN float round_element(float x, float s, float inv, const Record& record, int i, ts_u32 table) {
  float z = e2m1::normalized(x, inv);
#if TS_BITS == 0
  float v = e2m1::nearest_magnitude(e2m1::magnitude(z));
#else
  float a = e2m1::capped(z);
#if TS_INPUT == 2
  // float32 alone reaches an x whose product with inv vanishes; it is still above 0.
  if (!e2m1::is_zero(x) && e2m1::is_zero(z)) a = e2m1::of_bits(1);
#endif
  float v = look_up(add_record(table + e2m1::place_offset(a), record, i));
#endif
  return e2m1::scaled(v, s, z);
}

// Non-finite x, zero, denormal, huge, negative or NaN scales. Rare; kept out of line so that the fast path stays small.
__device__ __noinline__ rows::Unit round_unit_any(rows::Unit unit, float s, ts_u32 word) {
  const float* table = 0;
#if TS_BITS > 0
  table = TABLE.magnitude;
#endif
  float y[rows::UNIT];
#pragma unroll
  for (int i = 0; i < rows::UNIT; i++) {
    float x = rows::element(unit, i);
    // The record reads the sign of z, which a negative scale turns.
    float turned = e2m1::of_bits(e2m1::bits_of(x) ^ (e2m1::bits_of(s) & e2m1::SIGN_BIT));
    y[i] = e2m1::round_any(x, s, e2m1::record_for(record_bits(word, i), turned, TS_BITS), TS_BITS, table);
  }
#pragma unroll
  for (int i = 0; i < rows::UNIT; i += 2) rows::set_elements(unit, i, y[i], y[i + 1]);
  return unit;
}

TS_FN rows::Unit round_unit(const rows::Unit& unit, float s, Record record, ts_u32 table) {
  if (!(e2m1::ordinary(s) && rows::all_finite(unit))) return round_unit_any(unit, s, record_word(record));
  float inv = e2m1::reciprocal_ordinary(s);
#if TS_BITS == 4
  record.plane[0] ^= rows::sign_nibbles(unit);
#endif
  rows::Unit out;
#pragma unroll
  for (int i = 0; i < rows::UNIT; i += 2)
    rows::set_elements(out, i, round_element(rows::element(unit, i), s, inv, record, i, table),
                       round_element(rows::element(unit, i + 1), s, inv, record, i + 1, table));
  return out;
}

// Scales of a row that has no record: its encoding, its decode scale, and whether its maximum was no number.
struct Native {
  e2m1::Encoding encoding;
  float decode;
  bool poisoned;
};

// From a given decode scale, or from the row's maximum (bits) where there is none.
TS_FN Native native_scales(const float* given, ts_u32 largest) {
  Native n;
  n.poisoned = false;
  float encode = 1.0f;
  n.decode = 1.0f;
#if !TS_E8M0
  if (given) {
    n.decode = __ldg(given);
    encode = e2m1::encode_scale_of(n.decode);
  } else {
    n.poisoned = largest >= e2m1::INFINITY_BITS;
    encode = e2m1::encode_scale(e2m1::of_bits(largest));
    n.decode = e2m1::reciprocal(encode);
  }
#endif
  n.encoding = e2m1::encoding_of(encode);
  return n;
}

// What a block of a native row is rounded with. NaN and infinity make their block NaN, a poisoned row is NaN throughout.
struct BlockScale {
  float multiplier, s;
};

// largest: bits of the block's maximum.
TS_FN BlockScale native_block(ts_u32 largest, const Native& n) {
  BlockScale block;
  ts_u32 byte = blocks::scale_of(largest, n.encoding, &block.multiplier);
  block.s = e2m1::multiply(rows::decode_scale_byte(byte), n.decode);
  if (n.poisoned || byte == blocks::NAN_BYTE) block.s = e2m1::nan_value();
  return block;
}

// The blocks of two units of a lane from the units' maxima. A block of 16 lies in two lanes, so that each of them
// computes the scale of one and they swap: 30 instructions instead of 52.
TS_FN void native_blocks(const ts_u32* largest, const Native& n, BlockScale* block) {
#if TS_BLOCK == 16
  const bool odd = threadIdx.x & 1;
  const ts_u32 own = odd ? largest[1] : largest[0], other = odd ? largest[0] : largest[1];
  const BlockScale mine = native_block(max(own, __shfl_xor_sync(0xFFFFFFFFu, other, 1)), n);
  BlockScale theirs;
  theirs.multiplier = __shfl_xor_sync(0xFFFFFFFFu, mine.multiplier, 1);
  theirs.s = __shfl_xor_sync(0xFFFFFFFFu, mine.s, 1);
  block[0] = odd ? theirs : mine;
  block[1] = odd ? mine : theirs;
#else
  for (int i = 0; i < 2; i++) block[i] = native_block(blocks::maximum(largest[i]), n);
#endif
}

TS_FN rows::Unit round_native(const rows::Unit& x, const BlockScale& block, ts_u32 table) {
  float y[rows::UNIT];
#pragma unroll
  for (int i = 0; i < rows::UNIT; i++) {
    float f = rows::element(x, i);
    float a = e2m1::capped(e2m1::multiply(f, block.multiplier));
    float v = TS_BITS == 0 ? 0.0f : look_up(table + (4u * e2m1::STRIDE << TS_BITS) + e2m1::place_offset(a));
    y[i] = e2m1::multiply(e2m1::with_sign_of(v, f), block.s);
  }
  rows::Unit out;
#pragma unroll
  for (int i = 0; i < rows::UNIT; i += 2) rows::set_elements(out, i, y[i], y[i + 1]);
  return out;
}

// Copies the table to shared memory; its loads hit L1 after a multiprocessor's first block, and are issued after those
// of x, whose latency hides them.
#if TS_BITS > 0
TS_FN ts_u32 shared_table(float* shared) {
  const int quads = ENTRIES / 4;
#pragma unroll
  for (int first = 0; first < quads; first += TS_THREADS) {
    int i = first + threadIdx.x;
    if (first + TS_THREADS <= quads || i < quads) ((float4*)shared)[i] = __ldg((const float4*)TABLE.magnitude + i);
  }
  __syncthreads();
  return (ts_u32)__cvta_generic_to_shared(shared);
}
#endif

#if TS_BITS > 0
#define TS_SHARED_TABLE()                          \
  __shared__ __align__(16) float shared[ENTRIES];  \
  const ts_u32 table = shared_table(shared)
#else
#define TS_SHARED_TABLE() const ts_u32 table = 0
#endif
