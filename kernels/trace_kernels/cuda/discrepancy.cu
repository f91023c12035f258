// How far a trainer's rounding is from a rollout's record: counts and squared errors over the rows of one site.
//
// sums[10] float64, added to: see trace_kernels.discrepancy for their meaning. Counts are exact below 2^53. Squared errors
// are summed in float32 over 8 elements, then in float64; their order varies from run to run, by about 1e-7 relative.
// Bound by instructions, not memory: two roundings and ten sums an element. It runs on the rows of a report, not in a step.
//
// TS_BITS 1 to 4, TS_RULE as in guided_round.cu.
#include "rows.cuh"

#ifndef TS_THREADS
#define TS_THREADS 256
#endif

TS_CONSTANT e2m1::Table<TS_BITS, TS_RULE> TABLE;
const int ENTRIES = (1 << TS_BITS) * e2m1::STRIDE;
const int SUMS = 10, COUNTS = 7;

struct Comparing {
  const ts_u8* x;
  const ts_u8* planes;
  const ts_u8* scales;
  const float* tensor_scale;
  const ts_u8* valid;  // or null
  double* sums;
  ts_u64 x_stride;
  ts_u32 units;
  ts_u32 scale_stride;
  rows::Divisor units_a_row;
};

struct Sums {
  ts_u32 count[COUNTS];
  float square[SUMS - COUNTS];
};

TS_FN ts_u32 record_bits(const Comparing& p, ts_u32 row, ts_u32 column, int i) {
#if TS_BITS == 4
  ts_u32 word = ((const ts_u32*)p.planes)[(ts_u64)row * p.units_a_row.divisor + column];
  return (word >> (4 * i)) & 15u;
#else
  ts_u32 bits = 0;
#pragma unroll
  for (int j = 0; j < TS_BITS; j++)
    bits |= ((p.planes[((ts_u64)row * TS_BITS + j) * p.units_a_row.divisor + column] >> i) & 1u) << j;
  return bits;
#endif
}

TS_FN float square(float f) { return e2m1::multiply(f, f); }

TS_FN void compare_element(float x, float s, float inv, ts_u32 code, const float* table, Sums& sums) {
  if (!e2m1::finite(x)) return;
  float z = e2m1::is_zero(x) ? 0.0f : e2m1::multiply(x, inv);
  ts_u32 entry = e2m1::place_offset(e2m1::capped(z)) / 4;
  if (!e2m1::is_zero(x) && entry == 0) entry = e2m1::BETWEEN;
  float guided = table[e2m1::record_for(code, z, TS_BITS) * e2m1::STRIDE + entry];
  float magic = e2m1::nearest_magic(e2m1::magnitude(z)), nearest = e2m1::magnitude_of_magic(magic);
  // The nearest codeword is an end of the bracket, and so is the guided one: they are equal or neighbours.
  int n = (int)(e2m1::bits_of(magic) & 7u), g = n + (guided > nearest) - (guided < nearest);
  // The reference, on z's side of zero: the recorded codeword where the record has it whole, else the guided one.
  int r = g;
  float reference = guided;
  bool mismatched, left, flipped = false;
#if TS_BITS == 4
  int k = (int)(code & 7u);
  bool opposite = (code >> 3) != (e2m1::bits_of(z) >> 31);
  flipped = opposite && k != 0;
  r = opposite ? -k : k;
  float v = e2m1::magnitude_of_magic(e2m1::of_bits(0x4B000000u + (ts_u32)k));
  reference = opposite ? -v : v;
  left = g != r;
  mismatched = n != r;
#else
  const ts_u32 mask = (1u << TS_BITS) - 1u;
  left = ((ts_u32)g & mask) != code;
  mismatched = ((ts_u32)n & mask) != code;
#endif
  sums.count[0] += 1;
  sums.count[1] += mismatched;
  sums.count[2] += mismatched && abs(n - r) == 1;
  sums.count[3] += g > n;
  sums.count[4] += g < n;
  sums.count[5] += left;
  sums.count[6] += flipped;
  sums.square[0] += square((nearest - reference) * s);
  sums.square[1] += square((guided - reference) * s);
  sums.square[2] += square(e2m1::magnitude(x) - guided * s);
}

extern "C" __global__ void __launch_bounds__(TS_THREADS) compare_rows(const Comparing p) {
  __shared__ float table[ENTRIES];
  __shared__ double total[SUMS];
  for (int i = threadIdx.x; i < ENTRIES; i += TS_THREADS) table[i] = TABLE.magnitude[i];
  if (threadIdx.x < SUMS) total[threadIdx.x] = 0.0;
  __syncthreads();
  double squares[SUMS - COUNTS] = {0.0, 0.0, 0.0};
  Sums counted = {};
  for (ts_u32 unit = blockIdx.x * TS_THREADS + threadIdx.x; unit < p.units; unit += gridDim.x * TS_THREADS) {
    ts_u32 row = rows::quotient(unit, p.units_a_row), column = unit - row * p.units_a_row.divisor;
    if (p.valid && !p.valid[row]) continue;
    ts_u32 byte = p.scales[((ts_u64)row * p.units_a_row.divisor + column) / rows::UNITS_A_BLOCK];
    float s = e2m1::multiply(rows::decode_scale_byte(byte), p.tensor_scale[row * p.scale_stride]);
    if (!e2m1::finite(s) || e2m1::is_zero(s)) continue;
    float inv = e2m1::reciprocal(s);
    rows::Unit x = rows::load_unit(p.x, row * p.x_stride + column * rows::UNIT);
#pragma unroll
    for (int i = 0; i < rows::UNIT; i++)
      compare_element(rows::element(x, i), s, inv, record_bits(p, row, column, i), table, counted);
#pragma unroll
    for (int i = 0; i < SUMS - COUNTS; i++) squares[i] += (double)counted.square[i], counted.square[i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    double value = i < COUNTS ? (double)counted.count[i] : squares[i < COUNTS ? 0 : i - COUNTS];
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(total + i, value);
  }
  __syncthreads();
  if (threadIdx.x < SUMS) atomicAdd(p.sums + threadIdx.x, total[threadIdx.x]);
}
