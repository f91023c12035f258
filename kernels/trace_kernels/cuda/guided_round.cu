// Guided rounding and rounding to nearest of activation rows, y = clamp to bracket(record) * s.
//
//     round_rows       rows that follow each other, all with a record, one tensor scale: a flat run of units
//     round_each_row   anything else: strides, validity, a row map, a tensor scale per row; a warp a row
//
// Bytes moved an element (bfloat16, one bit, NVFP4): 2 + 2 + 1/8 + 1/16. Memory bound; the switches of rows.cuh and
//     TS_BITS   code bits in a record, 0 (rounding to nearest, no record) to 4 (whole codes)
//     TS_RULE   0 paper, 1 cell, 2 bracket
#include "blocks.cuh"

#ifndef TS_THREADS
#define TS_THREADS 128
#endif
#ifndef TS_FLIGHT
#define TS_FLIGHT 2  // units a thread loads before it uses the first
#endif

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

// y of a unit whose block has this maximum. NaN and infinity make their block NaN, a poisoned row is NaN throughout.
TS_FN rows::Unit round_native(const rows::Unit& x, ts_u32 largest, const Native& n, ts_u32 table) {
  float multiplier;
  ts_u32 byte = blocks::scale_of(largest, n.encoding, &multiplier);
  float s = e2m1::multiply(rows::decode_scale_byte(byte), n.decode);
  if (n.poisoned || byte == blocks::NAN_BYTE) s = e2m1::nan_value();
  float y[rows::UNIT];
#pragma unroll
  for (int i = 0; i < rows::UNIT; i++) {
    float f = rows::element(x, i);
    float a = e2m1::capped(e2m1::multiply(f, multiplier));
    float v = TS_BITS == 0 ? 0.0f : look_up(table + (4u * e2m1::STRIDE << TS_BITS) + e2m1::place_offset(a));
    y[i] = e2m1::multiply(e2m1::with_sign_of(v, f), s);
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

struct Rounding {
  const ts_u8* x;
  ts_u8* y;
  const ts_u8* planes;        // [T, b, W / 8], whole codes [T, W / 2]
  const ts_u8* scales;        // [T, W / TS_BLOCK]
  const float* tensor_scale;  // [1]
  ts_u32 units;               // T * W / 8, below 2^31
  rows::Divisor units_a_row;
};

extern "C" __global__ void __launch_bounds__(TS_THREADS) round_rows(const Rounding p) {
  const ts_u32 first = blockIdx.x * (TS_THREADS * TS_FLIGHT) + threadIdx.x;
  rows::Unit x[TS_FLIGHT];
  Record record[TS_FLIGHT];
  ts_u32 byte[TS_FLIGHT];
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    ts_u32 unit = first + k * TS_THREADS;
    if (unit >= p.units) break;
    ts_u32 row = 0, column = 0;
    if (TS_BITS == 2 || TS_BITS == 3) {
      row = rows::quotient(unit, p.units_a_row);
      column = unit - row * p.units_a_row.divisor;
    }
    x[k] = rows::load_unit(p.x, (ts_u64)unit * rows::UNIT);
    record[k] = load_record(p.planes, unit, row, column, p.units_a_row.divisor);
    byte[k] = __ldg(p.scales + unit / rows::UNITS_A_BLOCK);
  }
  const float tensor_scale = __ldg(p.tensor_scale);
  TS_SHARED_TABLE();
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    ts_u32 unit = first + k * TS_THREADS;
    if (unit >= p.units) break;
    float s = e2m1::multiply(rows::decode_scale_byte(byte[k]), tensor_scale);
    rows::store_unit(p.y, (ts_u64)unit * rows::UNIT, round_unit(x[k], s, record[k], table));
  }
}

struct RowRounding {
  const ts_u8* x;
  ts_u8* y;
  const ts_u8* planes;         // [R, b, W / 8], whole codes [R, W / 2]
  const ts_u8* scales;         // [R, W / TS_BLOCK]
  const float* tensor_scale;   // [1], or one per row of the record
  const ts_u8* valid;          // [T] or null; 0: the row has no record
  const int* record_rows;      // [T] or null; the record row of each row, below 0 for none
  const float* native_scale;   // decode scale of rows without a record, or null: from the row's maximum
  ts_u64 x_stride, y_stride;   // elements from row to row
  ts_u32 tokens, units_a_row;
  ts_u32 scale_stride;         // 0: one tensor scale, 1: one per record row
  ts_u32 lanes;                // lanes that share a row, a power of two up to 32
};

#ifndef TS_HOLD
#define TS_HOLD 8  // units of a row that a lane holds at once
#endif

struct Part {
  rows::Unit x[TS_HOLD];
  Record record[TS_HOLD];
  ts_u32 byte[TS_HOLD];
};

struct Row {
  ts_u64 x, y;  // elements
  ts_u32 record_row;
  bool guided, native;
};

TS_FN Row row_of(const RowRounding& p, ts_u32 row) {
  Row r = {row * p.x_stride, row * p.y_stride, row, row < p.tokens, false};
  if (!r.guided) return r;
  if (p.valid) r.guided = __ldg(p.valid + row) != 0;
  if (p.record_rows) {
    int record_row = __ldg(p.record_rows + row);
    r.guided = r.guided && record_row >= 0;
    r.record_row = (ts_u32)record_row;
  }
  r.native = !r.guided;
  return r;
}

// The part of a row from unit `start` on. Lanes past the end hold zeros, which leave maxima alone.
TS_FN void load_part(const RowRounding& p, const Row& row, ts_u32 start, ts_u32 lane, Part& part) {
#pragma unroll
  for (int h = 0; h < TS_HOLD; h++) {
    ts_u32 unit = start + h * p.lanes + lane;
    part.x[h] = rows::Unit();
    if (unit >= p.units_a_row || !(row.guided || row.native)) continue;
    part.x[h] = rows::load_unit(p.x, row.x + unit * rows::UNIT);
    if (!row.guided) continue;
    ts_u64 flat = (ts_u64)row.record_row * p.units_a_row + unit;
    part.record[h] = load_record(p.planes, flat, row.record_row, unit, p.units_a_row);
    part.byte[h] = __ldg(p.scales + flat / rows::UNITS_A_BLOCK);
  }
}

TS_FN ts_u32 maximum_of(const Part& part) {
  ts_u32 largest = 0;
#pragma unroll
  for (int h = 0; h < TS_HOLD; h++) largest = max(largest, rows::largest_magnitude(part.x[h]));
  return largest;
}

// Maximum of a native row, over all its parts and lanes. The first part is at hand; others are read here and once more
// for rounding, out of the cache.
TS_FN ts_u32 row_maximum(const RowRounding& p, const Row& row, ts_u32 lane, const Part& part) {
  ts_u32 largest = maximum_of(part);
  for (ts_u32 unit = TS_HOLD * p.lanes + lane; unit < p.units_a_row; unit += p.lanes)
    if (row.native) largest = max(largest, rows::largest_magnitude(rows::load_unit(p.x, row.x + unit * rows::UNIT)));
  for (ts_u32 step = p.lanes / 2; step > 0; step /= 2)
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  return largest;
}

#ifndef TS_RESIDENT
#define TS_RESIDENT 1
#endif

extern "C" __global__ void __launch_bounds__(TS_THREADS, TS_RESIDENT) round_each_row(const RowRounding p) {
  const ts_u32 lane = threadIdx.x & (p.lanes - 1);
  const Row row = row_of(p, (blockIdx.x * TS_THREADS + threadIdx.x) >> __popc(p.lanes - 1));
  Part part;
  load_part(p, row, 0, lane, part);
  const float tensor_scale = row.guided ? __ldg(p.tensor_scale + row.record_row * p.scale_stride) : 1.0f;
  TS_SHARED_TABLE();
  const bool native = __any_sync(0xFFFFFFFFu, row.native);
  Native scales;
  if (native) {
    bool dynamic = !TS_E8M0 && !p.native_scale;
    scales = native_scales(p.native_scale, dynamic ? row_maximum(p, row, lane, part) : 0u);
  }
  for (ts_u32 start = 0; start < p.units_a_row; start += TS_HOLD * p.lanes) {
    if (start > 0) load_part(p, row, start, lane, part);
#pragma unroll
    for (int h = 0; h < TS_HOLD; h++) {
      ts_u32 unit = start + h * p.lanes + lane;
      ts_u32 largest = native ? blocks::maximum(rows::largest_magnitude(part.x[h])) : 0u;
      if (unit >= p.units_a_row || !(row.guided || row.native)) continue;
      rows::Unit y;
      if (row.guided) {
        float s = e2m1::multiply(rows::decode_scale_byte(part.byte[h]), tensor_scale);
        y = round_unit(part.x[h], s, part.record[h], table);
      } else {
        y = round_native(part.x[h], largest, scales, table);
      }
      rows::store_unit(p.y, row.y + unit * rows::UNIT, y);
    }
  }
}
