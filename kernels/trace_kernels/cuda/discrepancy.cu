// How far a trainer's rounding is from a rollout's record: counts and squared errors over the rows of one site.
//
// sums[10] float64, added to: see trace_kernels.discrepancy for their meaning. Counts are exact below 2^53. Squared errors
// are summed in float32 over at most 240 elements, then in float64.
//
// 16 elements (a pair of units), one scale, a thread at a time; an element is a look-up of all its counts at once
// (compare.cuh). What that form does not hold (NaN, infinity, scales that are 0, negative, vanishing or above 2^13) goes
// the long way, out of line.
//
// TS_BITS 1 to 4, TS_RULE as in guided_round.cu.
// TS_GAP      1: rows do not follow each other in memory
// TS_ROWS     1: rows without a record, or a tensor scale per row
// TS_ALIGNED  1: a row's pairs divide the threads of a block, so that nothing divides by the width
#include "compare.cuh"
#include "rows.cuh"

#ifndef TS_THREADS
#define TS_THREADS 512
#endif
#ifndef TS_DEPTH
#define TS_DEPTH 2  // pairs that a thread holds
#endif

typedef compare::Outcomes<TS_BITS, TS_RULE> Outcomes;
TS_CONSTANT Outcomes OUTCOMES;
const int SIZE = 4 * Outcomes::WORDS, NUMBERS = compare::places_of(TS_BITS, TS_RULE);
const int ENTRIES = compare::entries(TS_BITS, NUMBERS);
const int SUMS = 10, COUNTS = 7, PAIR = 2 * rows::UNIT, PAIRS_A_BLOCK = TS_BLOCK / PAIR, PAIR_BYTES = 8 * rows::WORDS;
const int PLANES = TS_BITS == 4 ? 2 : TS_BITS;
const int TILE = TS_THREADS * TS_DEPTH;  // pairs of a block at a time
const int BATCH = 15 / TS_DEPTH;         // tiles until the 8-bit counters are emptied: 15 * 16 <= 255
const int NAN_BYTE = TS_E8M0 ? 255 : 0x7F;

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
  rows::Divisor pairs_a_row;
};

// A pair on its way: everything of it that is in memory.
struct Held {
  rows::Unit x[2];
  ts_u32 planes[PLANES];
  int byte;      // of the scale; E4M3 with its sign extended
  float scale;   // of the tensor
  ts_u32 valid;
};

// Pair offset + thread of a tile. ALIGNED: the row is known without a division, and `offset`, a constant, ends in the
// instructions.
struct Place {
  const ts_u8 *x, *planes, *scales;
  ts_u32 row;
};

template <bool ALIGNED>
TS_FN Place place_of(const Comparing& p, ts_u32 tile, ts_u32 thread, int offset) {
  const ts_u32 pairs_a_row = p.pairs_a_row.divisor;
  const ts_u64 first = (ts_u64)tile * TILE + thread;
  Place place = {p.x + first * PAIR_BYTES + offset * PAIR_BYTES, p.planes,
                 p.scales + first / PAIRS_A_BLOCK + offset / PAIRS_A_BLOCK, 0};
  if (TS_GAP || TS_ROWS || TS_BITS == 2 || TS_BITS == 3) {
    if (ALIGNED)
      place.row = (tile * TS_DEPTH + offset / TS_THREADS) * (TS_THREADS / pairs_a_row) + thread / pairs_a_row;
    else
      place.row = rows::quotient((ts_u32)first + offset, p.pairs_a_row);
  }
  if (TS_GAP) place.x += place.row * p.x_gap;
  if (TS_BITS == 4)
    place.planes += first * 8 + offset * 8;
  else if (TS_BITS == 1 || !ALIGNED)
    place.planes += first * 2 + offset * 2 + (ts_u64)place.row * (TS_BITS - 1) * 2 * pairs_a_row;
  else
    place.planes += (ts_u64)tile * (TILE * 2 * TS_BITS) + offset * 2 * TS_BITS +
                    (2 * thread + thread / pairs_a_row * (TS_BITS - 1) * 2 * pairs_a_row);
  return place;
}

// 16 bits of every plane, or 16 nibbles.
TS_FN void load_planes(const Comparing& p, const ts_u8* from, ts_u32* planes) {
#if TS_BITS == 4
  uint2 both = __ldg((const uint2*)from);
  planes[0] = both.x, planes[1] = both.y;
#else
#pragma unroll
  for (int j = 0; j < TS_BITS; j++)
    planes[j] = __ldg((const ts_u16*)(from + j * (2 * (ts_u64)p.pairs_a_row.divisor)));
#endif
}

// All of a pair but x.
TS_FN void load_aside(const Comparing& p, const Place& place, Held& held) {
  if (TS_ROWS) {
    held.valid = p.valid ? __ldg(p.valid + place.row) : 1;
    held.scale = __ldg(p.tensor_scale + place.row * p.scale_stride);
  }
  held.byte = TS_E8M0 ? (int)__ldg(place.scales) : (int)__ldg((const signed char*)place.scales);
  load_planes(p, place.planes, held.planes);
}

// Tensor scale as block_scale takes it. An overflow makes no ordinary scale, and the long form takes over.
TS_FN float tensor_factor(float scale) { return TS_E8M0 ? scale : e2m1::multiply(scale, 1.329227995784916e36f); }

// Scale of a block where it is ordinary, else a number that is not, but for the NaN byte of E4M3. The seven low bits of
// an E4M3 byte are a float's exponent and mantissa 120 binades too low; a set sign makes the number negative.
TS_FN float block_scale(int byte, float factor) {
  return e2m1::multiply(e2m1::of_bits((ts_u32)byte << (TS_E8M0 ? 23 : 20)), factor);
}

struct Tally {
  ts_u32 a, b, flipped;  // fields of compare.cuh
  float squares[SUMS - COUNTS];
};

// What the table look-ups need, in registers that the compiler takes for unknown: it would otherwise set constants anew
// for every unit, and mask and set in two instructions where one takes both.
struct Table {
  ts_u32 upper, lower;
};

TS_FN Table table_at(const ts_u32* table) {
  Table known = {compare::upper_bits(SIZE),
                 compare::lower_bits(SIZE, NUMBERS) - (ts_u32)__cvta_generic_to_shared(table) / (NUMBERS * SIZE)};
  asm volatile("" : "+r"(known.upper), "+r"(known.lower));
  return known;
}

// 16 elements, not yet known to be ordinary.
struct Sums {
  ts_u32 word[2], second[2];
  float error, s;
};

TS_FN rows::Unit magnitudes(rows::Unit unit) {
#pragma unroll
  for (int i = 0; i < rows::WORDS; i++) unit.w[i] &= TS_INPUT == 2 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  return unit;
}

TS_FN void add_unit(const rows::Unit& x, const compare::Records& records, int half, float eighth, const Table& table,
                    Sums& sums) {
  const rows::Unit absolute = magnitudes(x);
  sums.word[half] = sums.second[half] = 0;
#pragma unroll
  for (int i = 0; i < rows::UNIT; i++) {
    float f = rows::element(absolute, i);
    float t = e2m1::multiply_saturated(f, eighth);
#if TS_INPUT == 2
    // float32 alone reaches an x whose product vanishes; it is still above 0.
    if (e2m1::is_zero(t) && !e2m1::is_zero(f)) t = e2m1::of_bits(1);
#endif
    ts_u32 upper = compare::upper_of(records, half * rows::UNIT + i, TS_BITS, table.upper);
    ts_u32 address = compare::offset_of(t, upper, table.lower, SIZE, NUMBERS), word;
#if TS_BITS == 4
    ts_u32 second;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word), "=r"(second) : "r"(address));
    sums.second[half] += second;
#else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
#endif
    sums.word[half] += word;
    float e = e2m1::multiply_add(e2m1::of_bits(word & compare::MAGNITUDE), e2m1::negated(sums.s), f);
    sums.error = e2m1::multiply_add(e, e, sums.error);
  }
}

// 2^23 as bits: added to an integer below it, those of a float 2^23 above.
const ts_u32 MAGIC = 0x4B000000u;
TS_FN float less_magic(ts_u32 bits) { return e2m1::add(e2m1::of_bits(bits), -e2m1::TWO_23); }

TS_FN void add_sums(const Sums& sums, Tally& tally) {
  ts_u32 a = (sums.word[0] & compare::FIELDS_A) + (sums.word[1] & compare::FIELDS_A);
  tally.a += a;
  tally.b += (sums.word[0] & compare::FIELDS_B) + (sums.word[1] & compare::FIELDS_B);
  tally.squares[2] = e2m1::add(tally.squares[2], sums.error);
  float squared = e2m1::multiply(sums.s, sums.s);
#if TS_BITS == 4
  ts_u32 both = sums.second[0] + sums.second[1];
  tally.flipped += (sums.second[0] >> compare::FLIPPED) + (sums.second[1] >> compare::FLIPPED);
  float nearest = less_magic((both & compare::REFERENCE_MASK) | MAGIC);
  float guided = less_magic((both >> compare::REFERENCE_SHIFT & compare::REFERENCE_MASK) | MAGIC);
  tally.squares[0] = e2m1::multiply_add(nearest, squared, tally.squares[0]);
  tally.squares[1] = e2m1::multiply_add(guided, squared, tally.squares[1]);
#else
  // raised + lowered + 3 E: the fields are bytes, at 0, 8 and 16.
  float quarters = less_magic(__dp4a(a, 0x00030101u, MAGIC));
  tally.squares[0] = e2m1::multiply_add(quarters, squared, tally.squares[0]);
#endif
}

// The long form of a pair, straight into the block's sums. Rare.
__device__ __noinline__ void add_pair_any(const Comparing& p, ts_u32 pair, double* total) {
  const Place place = place_of<false>(p, 0, pair, 0);
  if (TS_ROWS && p.valid && __ldg(p.valid + place.row) == 0) return;
  float scale = __ldg(p.tensor_scale + (TS_ROWS ? place.row * p.scale_stride : 0u));
  float s = e2m1::multiply(rows::decode_scale_byte(__ldg(place.scales)), scale);
  if (!e2m1::finite(s) || e2m1::is_zero(s)) return;
  float inv = e2m1::reciprocal(s);
  double size = e2m1::magnitude(s), unit = 0.25 * size * size;
  ts_u32 planes[PLANES];
  load_planes(p, place.planes, planes);
#pragma unroll 1
  for (int i = 0; i < PAIR; i++) {
    const rows::Unit held = rows::load_unit(place.x, i & ~7);
    float x = 0.0f;
#pragma unroll
    for (int j = 0; j < rows::UNIT; j++) x = j == (i & 7) ? rows::element(held, j) : x;
    if (!e2m1::finite(x)) continue;
    ts_u32 record = 0;
#pragma unroll
    for (int j = 0; j < PLANES; j++)
      record |= TS_BITS == 4 ? (j == i >> 3 ? planes[j] >> (4 * (i & 7)) & 15u : 0u) : (planes[j] >> i & 1u) << j;
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

// Sums of the pair held; true where the short form holds. With `next` it then holds the pair there: each half of x is asked
// for as soon as its registers are free, so that the arithmetic of the other half and of other warps hides the memory.
TS_FN bool sum_pair(const Comparing& p, Held& held, const Place* next, float factor, const Table& table, Sums& sums) {
  const Held now = held;
  if (next) load_aside(p, *next, held);
  sums.s = block_scale(now.byte, TS_ROWS ? tensor_factor(now.scale) : factor);
  sums.error = 0.0f;
  const float eighth = e2m1::multiply(e2m1::reciprocal_ordinary(sums.s), 0.125f);
  compare::Records records = compare::arrange(now.planes, TS_BITS);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (TS_BITS == 4) records.word[half] ^= rows::sign_nibbles(now.x[half]);
    add_unit(now.x[half], records, half, eighth, table, sums);
    if (next) held.x[half] = rows::load_unit(next->x, half * rows::UNIT);
  }
  // NaN and infinity of x stay in the error.
  return compare::ordinary(sums.s) && sums.error < e2m1::of_bits(e2m1::INFINITY_BITS) &&
         (TS_E8M0 || now.byte != NAN_BYTE) && (!TS_ROWS || now.valid);
}

// Counts and squares of a batch of pairs, in the order of `sums`.
TS_FN void flush(const Tally& t, ts_u32 pairs, ts_u32* counts, double* squares) {
  ts_u32 raised = t.a & 255u, lowered = t.a >> 8 & 255u;
  counts[0] += pairs * PAIR;
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
  const int copies = compare::copies(TS_BITS), part = 2 * (NUMBERS + 1);
  for (int i = threadIdx.x; i < (copies << TS_BITS) * part; i += TS_THREADS) {
    int record = i / part & ((1 << TS_BITS) - 1), copy = i / part >> TS_BITS, place = compare::place_at(i % part, NUMBERS);
    int entry = compare::displaced(TS_BITS, record, copy) * (NUMBERS + 1) + i % part;
#pragma unroll
    for (int w = 0; w < Outcomes::WORDS; w++)
      table[entry * Outcomes::WORDS + w] = OUTCOMES.word[(record * e2m1::PLACES + place) * Outcomes::WORDS + w];
  }
}

TS_FN void load_pair(const Comparing& p, const Place& place, Held& held) {
  load_aside(p, place, held);
#pragma unroll
  for (int half = 0; half < 2; half++) held.x[half] = rows::load_unit(place.x, half * rows::UNIT);
}

// Adds the pairs held, of tile `tile`, and holds those of `next`. Returns how many took the short form.
TS_FN ts_u32 add_tile(const Comparing& p, Held* held, ts_u32 tile, ts_u32 next, float factor, const Table& table,
                      double* total, Tally& tally) {
  Sums sums[TS_DEPTH];
  bool ordinary[TS_DEPTH], all = true;
#pragma unroll
  for (int k = 0; k < TS_DEPTH; k++) {
    const Place place = place_of<TS_ALIGNED>(p, next, threadIdx.x, k * TS_THREADS);
    ordinary[k] = sum_pair(p, held[k], &place, factor, table, sums[k]);
    all = all && ordinary[k];
    // Keeps the assembler from putting off the loads of two pairs until the registers of both are free. Three of them did
    // worse with it.
    if (TS_DEPTH == 2) __syncwarp();
  }
  if (all) {
#pragma unroll
    for (int k = 0; k < TS_DEPTH; k++) add_sums(sums[k], tally);
    return TS_DEPTH;
  }
  ts_u32 added = 0;
#pragma unroll
  for (int k = 0; k < TS_DEPTH; k++) {
    if (ordinary[k])
      add_sums(sums[k], tally), added++;
    else
      add_pair_any(p, tile * TILE + k * TS_THREADS + threadIdx.x, total);
  }
  return added;
}

extern "C" __global__ void __launch_bounds__(TS_THREADS, 1) compare_rows(const Comparing p) {
  __shared__ __align__(1024) ts_u32 entries[ENTRIES * Outcomes::WORDS];
  __shared__ double total[SUMS];
  double squares[SUMS - COUNTS] = {};
  ts_u32 counts[COUNTS] = {};
  const ts_u32 tiles = p.pairs / TILE;
  const float factor = TS_ROWS ? 0.0f : tensor_factor(__ldg(p.tensor_scale));
  ts_u32 tile = blockIdx.x;
  Held held[TS_DEPTH];
  if (tile < tiles) {
#pragma unroll
    for (int k = 0; k < TS_DEPTH; k++)
      load_pair(p, place_of<TS_ALIGNED>(p, tile, threadIdx.x, k * TS_THREADS), held[k]);
  }
  fill_table(entries);
  if (threadIdx.x < SUMS) total[threadIdx.x] = 0.0;
  __syncthreads();
  const Table table = table_at(entries);
  while (tile < tiles) {
    Tally tally = {};
    ts_u32 added = 0;
#pragma unroll 1
    for (int n = 0; n < BATCH && tile < tiles; n++) {
      // At the end the last tile is read once more, out of L2.
      added += add_tile(p, held, tile, min(tile + gridDim.x, tiles - 1), factor, table, total, tally);
      tile += gridDim.x;
    }
    flush(tally, added, counts, squares);
  }
  // What fills no tile.
  for (ts_u32 pair = tiles * TILE + blockIdx.x * TS_THREADS + threadIdx.x; pair < p.pairs; pair += gridDim.x * TS_THREADS) {
    Tally tally = {};
    Sums sums;
    load_pair(p, place_of<false>(p, 0, pair, 0), held[0]);
    const bool ordinary = sum_pair(p, held[0], 0, factor, table, sums);
    if (ordinary)
      add_sums(sums, tally);
    else
      add_pair_any(p, pair, total);
    flush(tally, ordinary, counts, squares);
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
