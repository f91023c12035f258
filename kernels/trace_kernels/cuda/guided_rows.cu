// Guided rounding row by row: strides, rows without a record, a row map, a tensor scale per row. Rows without a record are
// rounded with their own scales, so that the elements of a row wait in registers for its maximum.
//
// The switches of rows.cuh and rounding.cuh, and
#ifndef TS_THREADS
#define TS_THREADS 128
#endif
#include "rounding.cuh"

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
};

// TS_LANES  threads that share a row, a power of two up to those of a block
// TS_HOLD   units of a row that a lane holds at once
// TS_WHOLE  1: TS_LANES * TS_HOLD units divide a row
// TS_PARTS  1: a row has more units than that
#ifndef TS_HOLD
#define TS_HOLD 8
#endif
#ifndef TS_LANES
#define TS_LANES 32
#endif
#ifndef TS_WHOLE
#define TS_WHOLE 0
#endif
#ifndef TS_PARTS
#define TS_PARTS 1
#endif
#ifndef TS_RESIDENT
#define TS_RESIDENT 1
#endif
const ts_u32 SPAN = TS_LANES * TS_HOLD;

// Units of a row on their way. In a row without a record `byte` takes the maximum of the unit.
struct Part {
  rows::Unit x[TS_HOLD];
  Record record[TS_HOLD];
  ts_u32 byte[TS_HOLD];
};

struct Row {
  ts_u32 number, record_row;
  bool guided, native;
};

TS_FN Row row_of(const RowRounding& p, ts_u32 number) {
  Row r = {number, number, number < p.tokens, false};
  if (!r.guided) return r;
  if (p.valid) r.guided = __ldg(p.valid + number) != 0;
  if (p.record_rows) {
    int record_row = __ldg(p.record_rows + number);
    r.guided = r.guided && record_row >= 0;
    r.record_row = (ts_u32)record_row;
  }
  r.native = !r.guided;
  return r;
}

TS_FN ts_u32 lane_of_row() { return threadIdx.x & (TS_LANES - 1); }

// The part of a row from unit `start` on. Lanes past the end of a row hold zeros, which leave maxima alone.
TS_FN void load_part(const RowRounding& p, const Row& row, ts_u32 start, Part& part) {
  const ts_u32 lane = start + lane_of_row();
  const ts_u64 flat = (ts_u64)row.record_row * p.units_a_row + lane;
  const ts_u8* x = p.x + (row.number * p.x_stride + lane * rows::UNIT) * (rows::WORDS / 2);
  const ts_u8* scales = p.scales + flat / rows::UNITS_A_BLOCK;
#pragma unroll
  for (int h = 0; h < TS_HOLD; h++) {
    if (!TS_WHOLE) part.x[h] = rows::Unit();
    if (!(row.guided || row.native) || !(TS_WHOLE || lane + h * TS_LANES < p.units_a_row)) continue;
    part.x[h] = rows::load_unit(x, h * TS_LANES * rows::UNIT);
    if (!row.guided) continue;
    part.record[h] = load_record(p.planes + h * TS_LANES * (TS_BITS == 4 ? 4 : 1), flat, row.record_row, lane, p.units_a_row);
    part.byte[h] = __ldg(scales + h * TS_LANES / rows::UNITS_A_BLOCK);
  }
}

TS_FN void take_maxima(const Row& row, Part& part) {
#pragma unroll
  for (int h = 0; h < TS_HOLD; h++)
    if (row.native) part.byte[h] = rows::largest_magnitude(part.x[h]);
}

#if TS_LANES > 32
// The threads of a row wait for each other: one or two rows a block. Numbers of barriers are constants, since a block with
// a computed one reserves all 16 and fewer blocks fit a multiprocessor (.73 of a copy instead of .99).
TS_FN void row_barrier() {
#if TS_LANES == TS_THREADS
  __syncthreads();
#else
  if (threadIdx.x < TS_LANES)
    asm volatile("bar.sync 1, %0;" ::"n"(TS_LANES) : "memory");
  else
    asm volatile("bar.sync 2, %0;" ::"n"(TS_LANES) : "memory");
#endif
}
#endif

// Maximum of a native row, over all its parts and lanes. The first part is at hand; others are read here and once more
// for rounding, out of the cache. Warps that share a row wait for each other alone, and only if the row is native.
TS_FN ts_u32 row_maximum(const RowRounding& p, const Row& row, const Part& part) {
  ts_u32 largest = 0;
  if (row.native) {
#pragma unroll
    for (int h = 0; h < TS_HOLD; h++) largest = max(largest, part.byte[h]);
    for (ts_u32 unit = SPAN + lane_of_row(); TS_PARTS && unit < p.units_a_row; unit += TS_LANES)
      largest = max(largest, rows::largest_magnitude(rows::load_unit(p.x, row.number * p.x_stride + unit * rows::UNIT)));
  }
#pragma unroll
  for (int step = (TS_LANES < 32 ? TS_LANES : 32) / 2; step > 0; step /= 2)
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
#if TS_LANES > 32
  __shared__ ts_u32 of_warp[TS_THREADS / 32];
  of_warp[threadIdx.x / 32] = largest;
  row_barrier();
  const ts_u32* row_warps = of_warp + threadIdx.x / TS_LANES * (TS_LANES / 32);
#pragma unroll
  for (int warp = 0; warp < TS_LANES / 32; warp++) largest = max(largest, row_warps[warp]);
#endif
  return largest;
}

TS_FN void round_part(const RowRounding& p, const Row& row, ts_u32 start, float tensor_scale, bool native,
                      const Native& scales, ts_u32 table, const Part& part) {
  const ts_u32 lane = start + lane_of_row();
  ts_u8* y = p.y + (row.number * p.y_stride + lane * rows::UNIT) * (rows::WORDS / 2);
#pragma unroll
  for (int first = 0; first < TS_HOLD; first += 2) {
    const int pair = first + 1 < TS_HOLD ? 2 : 1;
    BlockScale block[2];
    if (native) {
      const ts_u32 largest[2] = {part.byte[first], pair > 1 ? part.byte[first + pair - 1] : 0u};
      native_blocks(largest, scales, block);
    }
#pragma unroll
    for (int h = first; h < first + pair; h++) {
      if (!(row.guided || row.native) || !(TS_WHOLE || lane + h * TS_LANES < p.units_a_row)) continue;
      rows::Unit rounded;
      if (row.guided) {
        float s = e2m1::multiply(rows::decode_scale_byte(part.byte[h]), tensor_scale);
        rounded = round_unit(part.x[h], s, part.record[h], table);
      } else {
        rounded = round_native(part.x[h], block[h - first], table);
      }
      rows::store_unit(y, h * TS_LANES * rows::UNIT, rounded);
    }
  }
}

extern "C" __global__ void __launch_bounds__(TS_THREADS, TS_RESIDENT) round_each_row(const RowRounding p) {
  const Row row = row_of(p, (blockIdx.x * TS_THREADS + threadIdx.x) / TS_LANES);
  Part part;
  load_part(p, row, 0, part);
  const float tensor_scale = row.guided ? __ldg(p.tensor_scale + row.record_row * p.scale_stride) : 1.0f;
  TS_SHARED_TABLE();
  const bool native = __any_sync(0xFFFFFFFFu, row.native);
  Native scales;
  if (native) {
    take_maxima(row, part);
    scales = native_scales(p.native_scale, !TS_E8M0 && !p.native_scale ? row_maximum(p, row, part) : 0u);
  }
  round_part(p, row, 0, tensor_scale, native, scales, table, part);
  for (ts_u32 start = SPAN; TS_PARTS && start < p.units_a_row; start += SPAN) {
    load_part(p, row, start, part);
    if (native) take_maxima(row, part);
    round_part(p, row, start, tensor_scale, native, scales, table, part);
  }
}
