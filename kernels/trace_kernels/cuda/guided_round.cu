// Guided rounding and rounding to nearest of rows that follow each other, all with a record, one tensor scale: a flat run
// of units, y = clamp to bracket(record) * s. guided_rows.cu does everything else.
//
// Bytes moved an element (bfloat16, one bit, NVFP4): 2 + 2 + 1/8 + 1/16. Memory bound; the switches of rows.cuh and
// rounding.cuh.
#ifndef TS_THREADS
#define TS_THREADS 128
#endif
#ifndef TS_FLIGHT
#define TS_FLIGHT 2  // units a thread loads before it uses the first
#endif
#include "rounding.cuh"

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
