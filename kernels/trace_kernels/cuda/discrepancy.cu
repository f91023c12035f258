// How far a trainer's rounding is from a rollout's record: counts and squared errors over the rows of one site.
//
// sums[10] float64, added to: see trace_kernels.discrepancy for their meaning. Counts are exact below 2^53. Squared errors
// are summed in float32 over at most 240 elements, then in float64.
//
// 16 elements, one scale, a thread at a time; an element is a look-up of all its counts at once (compare.cuh). What that
// form does not hold (NaN, infinity, scales that are 0, negative, vanishing or above 2^13) goes the long way, out of line.
//
// TS_BITS 1 to 4, TS_RULE as in guided_round.cu.
#include "compare.cuh"
#include "rows.cuh"

#ifndef TS_THREADS
#define TS_THREADS 256
#endif
#ifndef TS_RESIDENT
#define TS_RESIDENT 3
#endif

typedef compare::Outcomes<TS_BITS, TS_RULE> Outcomes;
TS_CONSTANT Outcomes OUTCOMES;
const int SIZE = 4 * Outcomes::WORDS, ENTRIES = compare::entries(TS_BITS);
const int SUMS = 10, COUNTS = 7, PAIR = 2 * rows::UNIT, PAIRS_A_BLOCK = TS_BLOCK / PAIR;
const int BATCH = 15;  // pairs until the 8-bit counters are emptied: 15 * 16 <= 255

struct Comparing {
  const ts_u8* x;
  const ts_u8* planes;
  const ts_u8* scales;
  const float* tensor_scale;
  const ts_u8* valid;  // or null
  double* sums;
  ts_u64 x_gap;        // bytes between the end of a row and the next
  ts_u32 pairs;
  ts_u32 scale_stride;
  ts_u32 flat;         // no gap, all rows valid, one tensor scale
  rows::Divisor pairs_a_row;
};

// A pair on its way: everything of it that is in memory, and where it is.
struct Held {
  rows::Unit x[2];
  ts_u32 record[2];
  ts_u32 byte;
  float scale;
  ts_u32 pair;
  bool present;
};

struct Place {
  const ts_u8* x;
  ts_u32 row;
};

TS_FN Place place_of(const Comparing& p, ts_u32 pair) {
  Place place = {p.x + (ts_u64)pair * (PAIR * rows::WORDS / 2), 0};
  if (p.flat && (TS_BITS == 1 || TS_BITS == 4)) return place;
  place.row = rows::quotient(pair, p.pairs_a_row);
  place.x += place.row * p.x_gap;
  return place;
}

// A unit's record: the plane's byte, else a nibble an element. half: 0 or 1 of the pair.
TS_FN ts_u32 load_record(const Comparing& p, ts_u32 pair, ts_u32 row, int half) {
#if TS_BITS == 4
  return __ldg((const ts_u32*)p.planes + (2 * (ts_u64)pair + half));
#elif TS_BITS == 1
  return __ldg(p.planes + (2 * (ts_u64)pair + half));
#else
  const ts_u32 units_a_row = 2 * p.pairs_a_row.divisor;
  const ts_u8* first = p.planes + (2 * (ts_u64)pair + (ts_u64)row * (TS_BITS - 1) * units_a_row + half);
  ts_u32 record = 0;
#pragma unroll
  for (int j = 0; j < TS_BITS; j++) record |= compare::nibbles_of(__ldg(first + j * units_a_row)) << j;
  return record;
#endif
}

TS_FN rows::Unit magnitudes(rows::Unit unit) {
#pragma unroll
  for (int i = 0; i < rows::WORDS; i++) unit.w[i] &= TS_INPUT == 2 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  return unit;
}

// Scale of a block where it is ordinary, else a number that is not.
TS_FN float ordinary_scale(ts_u32 byte) {
#if TS_E8M0
  return e2m1::of_bits(byte << 23);
#else
  return byte < 0x7F ? e2m1::multiply(e2m1::of_bits(byte << 20), 1.329227995784916e36f) : e2m1::nan_value();
#endif
}

struct Tally {
  ts_u32 a, b, flipped;    // fields of compare.cuh
  ts_u32 pairs;
  float squares[SUMS - COUNTS];
};

struct Fields {
  ts_u32 word[2];
};

TS_FN void add_unit(const rows::Unit& x, ts_u32 record, float inv, float s, const ts_u32* table, Fields& sum, float& error) {
  ts_u32 base;
  asm("mov.b32 %0, %1;" : "=r"(base) : "n"(compare::upper_bits(SIZE)));
#if TS_BITS == 4
  record ^= rows::sign_nibbles(x);
#endif
  const rows::Unit absolute = magnitudes(x);
#pragma unroll
  for (int i = 0; i < rows::UNIT; i++) {
    float f = rows::element(absolute, i);
    float t = e2m1::multiply_saturated(f, inv);
#if TS_INPUT == 2
    // float32 alone reaches an x whose product vanishes; it is still above 0.
    if (e2m1::is_zero(t) && !e2m1::is_zero(f)) t = e2m1::of_bits(1);
#endif
    ts_u32 offset = compare::offset_of(t, compare::upper_of(record, i, TS_BITS, base), SIZE);
#if TS_BITS == 4
    uint2 words = *(const uint2*)((const ts_u8*)table + offset);
    ts_u32 word = words.x;
    sum.word[1] += words.y;
#else
    ts_u32 word = *(const ts_u32*)((const ts_u8*)table + offset);
#endif
    sum.word[0] += word;
    float e = e2m1::multiply_add(e2m1::of_bits(word & compare::MAGNITUDE), -s, f);
    error = e2m1::multiply_add(e, e, error);
  }
}

// An integer below 2^23 as a float, without the conversion unit.
TS_FN float as_float(ts_u32 n) { return e2m1::add(e2m1::of_bits(0x4B000000u + n), -e2m1::TWO_23); }

TS_FN void add_fields(const Fields& first, const Fields& second, float s, Tally& tally) {
  ts_u32 a = (first.word[0] & compare::FIELDS_A) + (second.word[0] & compare::FIELDS_A);
  tally.a += a;
  tally.b += (first.word[0] & compare::FIELDS_B) + (second.word[0] & compare::FIELDS_B);
  float squared = e2m1::multiply(s, s);
#if TS_BITS == 4
  ts_u32 both = first.word[1] + second.word[1];
  tally.flipped += (first.word[1] >> compare::FLIPPED) + (second.word[1] >> compare::FLIPPED);
  ts_u32 nearest = both & compare::REFERENCE_MASK, guided = both >> compare::REFERENCE_SHIFT & compare::REFERENCE_MASK;
  tally.squares[0] = e2m1::multiply_add(as_float(nearest), squared, tally.squares[0]);
  tally.squares[1] = e2m1::multiply_add(as_float(guided), squared, tally.squares[1]);
#else
  // raised + lowered + 3 E: the fields are bytes, at 0, 8 and 16.
  float quarters = as_float(__dp4a(a, 0x00030101u, 0u));
  tally.squares[0] = e2m1::multiply_add(quarters, squared, tally.squares[0]);
#endif
}

// The long form of a pair, straight into the block's sums. Rare.
__device__ __noinline__ void add_pair_any(const Comparing& p, ts_u32 pair, ts_u32 byte, float scale, double* total) {
  const Place place = place_of(p, pair);
  float s = e2m1::multiply(rows::decode_scale_byte(byte), scale);
  if (!e2m1::finite(s) || e2m1::is_zero(s)) return;
  float inv = e2m1::reciprocal(s);
  double size = e2m1::magnitude(s), unit = 0.25 * size * size;
#pragma unroll 1
  for (int i = 0; i < PAIR; i++) {
    const rows::Unit held = rows::load_unit(place.x, i & ~7);
    float x = 0.0f;
#pragma unroll
    for (int j = 0; j < rows::UNIT; j++) x = j == (i & 7) ? rows::element(held, j) : x;
    if (!e2m1::finite(x)) continue;
    ts_u32 record = load_record(p, pair, place.row, i >> 3) >> (TS_BITS == 1 ? (i & 7) : 4 * (i & 7));
    record &= (1u << TS_BITS) - 1u;
    if (TS_BITS == 4) record ^= (e2m1::bits_of(x) ^ e2m1::bits_of(s)) >> 31 << 3;
    const ts_u32* word = OUTCOMES.word + (record * e2m1::PLACES + compare::place_of(x, inv)) * Outcomes::WORDS;
    ts_u32 raised = word[0] >> compare::RAISED & 1u, lowered = word[0] >> compare::LOWERED & 1u;
    ts_u32 extra = word[0] >> compare::EXTRA & 63u, second = TS_BITS == 4 ? word[Outcomes::WORDS - 1] : 0u;
    double left = (double)(e2m1::magnitude(x)) - (double)e2m1::of_bits(word[0] & compare::MAGNITUDE) * size;
    double values[SUMS] = {1.0, (double)(word[0] >> compare::MISMATCHED & 1u),
                           (double)(TS_BITS == 4 ? word[0] >> compare::ADJACENT & 1u : raised + lowered),
                           (double)raised, (double)lowered, (double)(word[0] >> compare::LEFT & 1u),
                           (double)(second >> compare::FLIPPED),
                           unit * (TS_BITS == 4 ? second & compare::REFERENCE_MASK : raised + lowered + 3 * extra),
                           unit * (second >> compare::REFERENCE_SHIFT & compare::REFERENCE_MASK), left * left};
#pragma unroll
    for (int j = 0; j < SUMS; j++)
      if (values[j] != 0.0) atomicAdd(total + j, values[j]);
  }
}

// All of a pair but x; returns where x is.
TS_FN const ts_u8* load_aside(const Comparing& p, ts_u32 pair, Held& held) {
  const Place place = place_of(p, pair);
  held.pair = pair;
  held.present = true;
  if (!p.flat) {
    held.present = !p.valid || __ldg(p.valid + place.row) != 0;
    held.scale = __ldg(p.tensor_scale + place.row * p.scale_stride);
  }
  held.byte = __ldg(p.scales + pair / PAIRS_A_BLOCK);
#pragma unroll
  for (int half = 0; half < 2; half++) held.record[half] = load_record(p, pair, place.row, half);
  return place.x;
}

// Adds the pair held, and holds the next one: each half of x is asked for as soon as its registers are free, so that the
// arithmetic of the other half and of other warps hides the memory.
TS_FN void add_pair(const Comparing& p, Held& held, ts_u32 next, const ts_u32* table, double* total, Tally& tally) {
  const Held now = held;
  const ts_u8* x = load_aside(p, next, held);
  const float s = e2m1::multiply(ordinary_scale(now.byte), now.scale);
  const float eighth = e2m1::multiply(e2m1::reciprocal_ordinary(s), 0.125f);
  float error = 0.0f;
  Fields sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    add_unit(now.x[half], now.record[half], eighth, s, table, sum[half], error);
    held.x[half] = rows::load_unit(x, half * rows::UNIT);
  }
  if (!now.present) return;
  // NaN and infinity of x stay in the error.
  if (!(compare::ordinary(s) && e2m1::finite(error))) return add_pair_any(p, now.pair, now.byte, now.scale, total);
  tally.pairs += 1;
  tally.squares[2] += error;
  add_fields(sum[0], sum[1], s, tally);
}

// Counts and squares of a batch, in the order of `sums`.
TS_FN void flush(const Tally& t, ts_u32* counts, double* squares) {
  ts_u32 raised = t.a & 255u, lowered = t.a >> 8 & 255u;
  counts[0] += t.pairs * PAIR;
  counts[1] += t.b >> compare::MISMATCHED & 255u;
  counts[2] += TS_BITS == 4 ? t.a >> compare::ADJACENT : raised + lowered;
  counts[3] += raised;
  counts[4] += lowered;
  counts[5] += t.b >> compare::LEFT;
  counts[6] += t.flipped;
  squares[0] += 0.25 * (double)t.squares[0];
  squares[1] += 0.25 * (double)t.squares[1];
  squares[2] += (double)t.squares[2];
}

TS_FN void fill_table(ts_u32* table) {
  const int copies = TS_BITS == 1 ? 4 : 1, part = 2 * compare::BLOCK;
  for (int i = threadIdx.x; i < (copies << TS_BITS) * part; i += TS_THREADS) {
    int record = i / part & ((1 << TS_BITS) - 1), copy = i / part >> TS_BITS, place = compare::place_at(i % part);
    int entry = compare::displaced(TS_BITS, record, copy) * compare::BLOCK + i % part;
    if (place < 0) continue;
#pragma unroll
    for (int w = 0; w < Outcomes::WORDS; w++)
      table[entry * Outcomes::WORDS + w] = OUTCOMES.word[(record * e2m1::PLACES + place) * Outcomes::WORDS + w];
  }
}

extern "C" __global__ void __launch_bounds__(TS_THREADS, TS_RESIDENT) compare_rows(const Comparing p) {
  __shared__ __align__(16) ts_u32 table[ENTRIES * Outcomes::WORDS];
  __shared__ double total[SUMS];
  fill_table(table);
  if (threadIdx.x < SUMS) total[threadIdx.x] = 0.0;
  __syncthreads();
  double squares[SUMS - COUNTS] = {};
  ts_u32 counts[COUNTS] = {};
  const ts_u32 step = gridDim.x * TS_THREADS, last = p.pairs - 1;
  ts_u32 pair = blockIdx.x * TS_THREADS + threadIdx.x;
  Held held;
  held.scale = __ldg(p.tensor_scale);
  const ts_u8* x = load_aside(p, min(pair, last), held);
#pragma unroll
  for (int half = 0; half < 2; half++) held.x[half] = rows::load_unit(x, half * rows::UNIT);
  while (pair < p.pairs) {
    Tally tally = {};
#pragma unroll 1
    for (int k = 0; k < BATCH && pair < p.pairs; k++, pair += step)
      add_pair(p, held, min(pair + step, last), table, total, tally);
    flush(tally, counts, squares);
  }
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    double value = i < COUNTS ? (double)counts[i < COUNTS ? i : 0] : squares[i < COUNTS ? 0 : i - COUNTS];
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(total + i, value);
  }
  __syncthreads();
  if (threadIdx.x < SUMS) atomicAdd(p.sums + threadIdx.x, total[threadIdx.x]);
}
