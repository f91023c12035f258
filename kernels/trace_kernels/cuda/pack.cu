// Packing what an engine's quantizer left in memory into record rows: codes to bit planes, scales to linear order.
//
// One launch takes codes, scales and decode scales of up to MAX_SITES sites; blockIdx.y is the site. A thread takes a chunk
// of codes and the scales that belong to it, so that every block moves the same mix of bytes. Codes are nibbles, the even
// element low. A row of codes (and of linear scales) is found by
//
//     slot = slots ? slots[row] : row            below 0: the row is skipped
//     base + slot / page * page_stride + slot % page * token_stride + head * head_stride + byte in the head
//
// which covers contiguous and strided tensors (page 1, one head), SGLang's KV pools and vLLM's KV pages in either order.
// Scale s of a row m elsewhere, with G = ceil(scales a row / 4):
//
//     128x4           ((m / 128) * G + s / 4) * 512 + m % 32 * 16 + m / 32 % 4 * 4 + s % 4
//     8x4             ((m / 8) * G + s / 4) * 32 + m % 8 * 4 + s % 4
//     interleaved V   in a page, with S scales a head: token t / 4 * 4 + s / (S / 4), column s % (S / 4) * 4 + t % 4
//
// Swizzled rows share 32-byte sectors with rows 32 (128x4) or 1 (8x4) apart; the order of rows below lets a block use
// whole sectors.
//
// TS_BITS    code bits kept, 1 to 4
// TS_CHUNK   bytes of codes a thread takes at once, 16 or 8
// TS_BLOCK   elements a scale covers, 16 or 32
// TS_LAYOUT  of the scales, as in enum Layout
// TS_DENSE   1: rows of codes (and of linear scales) follow each other and keep their order, so that a chunk's number is
//            its address: 2.4 instructions an element instead of 4
// TS_SPLIT   1: a row lies in several pieces, the heads of a page or of a pool with heads apart
#include "e2m1.cuh"

#ifndef TS_THREADS
#define TS_THREADS 256
#endif
#ifndef TS_FLIGHT
#define TS_FLIGHT 2  // chunks a thread loads before it packs the first
#endif

const int MAX_SITES = 20;
const int WORDS = TS_CHUNK / 4;
const int SCALES = TS_CHUNK * 2 / TS_BLOCK;  // scale bytes of a chunk; 0: two chunks share one

enum Layout { LINEAR = 0, SWIZZLED_128X4 = 1, SWIZZLED_8X4 = 2, INTERLEAVED_V = 3 };
enum Flags { SLOTS_64 = 1, DEST_64 = 2, ENCODE = 4, SCALE_A_ROW = 8, DECODE_A_ROW = 16 };

struct Divisor {
  ts_u32 divisor, multiplier, shift;
};
TS_FN ts_u32 quotient(ts_u32 n, const Divisor& d) { return d.divisor == 1 ? n : __umulhi(n, d.multiplier) >> d.shift; }

struct Strides {
  ts_u32 page, token, head;  // bytes
};

struct Site {
  const ts_u8* codes;
  const ts_u8* scales;
  const float* global_scale;  // or null
  const void* slots;          // or null; int32, or int64 with SLOTS_64
  const void* dest;           // or null; record row of each row, below 0 for none
  ts_u8* planes;
  ts_u8* out_scales;
  float* decode;              // or null
  ts_u32 tokens, chunks;      // rows, and their chunks (128x4: of rows rounded up to 128)
  ts_u32 width_scales;        // scale bytes of a row
  ts_u32 flags;
  Divisor page, chunks_a_row, chunks_a_head;
  Strides code_strides, scale_strides;
};

struct Sites {
  Site site[MAX_SITES];
};

// Entry of an index array. Of 64 bits the low 32 hold every index below 2^31 and the sign of a negative one.
TS_FN int index_at(const void* indices, ts_u32 row, bool wide) { return __ldg((const int*)indices + ((ts_u64)row << wide)); }

// Where a chunk comes from and goes to.
struct Place {
  int slot, dest;  // below 0: skipped
  ts_u32 row, column, head, within;  // column in the row, head and column in the head, in chunks
  ts_u32 flat;                       // number of the chunk where rows follow each other
};

TS_FN bool kept(const Place& at) { return at.slot >= 0 && at.dest >= 0; }

// Nothing here looks at an index that it loads: a thread asks for those of all its chunks before it waits for the first.
TS_FN Place place_of(const Site& s, ts_u32 chunk) {
  Place at;
#if TS_DENSE && TS_LAYOUT == 0
  at.row = TS_BITS == 2 || TS_BITS == 3 || s.decode ? quotient(chunk, s.chunks_a_row) : 0;
#else
  at.row = quotient(chunk, s.chunks_a_row);
#endif
  at.column = at.within = chunk - at.row * s.chunks_a_row.divisor;
  if (TS_LAYOUT == SWIZZLED_128X4) at.row = (at.row & ~127u) | (at.row & 3u) << 5 | (at.row >> 2 & 31u);
  at.flat = TS_LAYOUT == SWIZZLED_128X4 ? at.row * s.chunks_a_row.divisor + at.column : chunk;
  at.head = 0;
#if TS_SPLIT
  at.head = quotient(at.column, s.chunks_a_head);
  at.within = at.column - at.head * s.chunks_a_head.divisor;
#endif
#if TS_DENSE
  at.slot = at.dest = at.row < s.tokens ? (int)at.row : -1;
  return at;
#endif
  at.slot = at.dest = -1;
  if (at.row >= s.tokens) return at;
  at.slot = s.slots ? index_at(s.slots, at.row, s.flags & SLOTS_64) : (int)at.row;
  at.dest = s.dest ? index_at(s.dest, at.row, s.flags & DEST_64) : (int)at.row;
  return at;
}

// Byte offset of a head of a token.
TS_FN ts_u64 head_offset(const Site& s, const Strides& strides, ts_u32 page, ts_u32 token, ts_u32 head) {
  ts_u64 offset = (ts_u64)page * strides.page;
  if (TS_SPLIT) offset += (ts_u64)token * strides.token + (ts_u64)head * strides.head;
  return offset;
}

// ---- scales ---------------------------------------------------------------------------------------------------------

TS_FN ts_u64 interleaved_offset(const Site& s, ts_u32 page, ts_u32 t, ts_u32 head, ts_u32 scale) {
  const ts_u32 quarter = s.chunks_a_head.divisor * SCALES / 4;
  ts_u32 token = t / 4 * 4 + scale / quarter, column = scale % quarter * 4 + t % 4;
  return head_offset(s, s.scale_strides, page, token, head) + column;
}

// The one or two scale bytes of a chunk, in the low bytes.
TS_FN ts_u32 load_scales(const Site& s, const Place& at, ts_u32 page, ts_u32 token) {
  if (SCALES == 0 && at.within % 2) return 0;
  const ts_u32 per_chunk = SCALES ? SCALES : 1;
#if TS_DENSE && TS_LAYOUT == 0
  const ts_u8* from = s.scales + (ts_u64)at.flat * TS_CHUNK * 2 / TS_BLOCK;
  return per_chunk == 2 ? __ldg((const ts_u16*)from) : __ldg(from);
#elif TS_LAYOUT == 1 || TS_LAYOUT == 2
  const ts_u32 first = SCALES ? at.column * SCALES : at.column / 2, groups = (s.width_scales + 3) / 4, m = at.row;
  const ts_u64 offset = TS_LAYOUT == SWIZZLED_128X4
                            ? ((ts_u64)(m / 128) * groups + first / 4) * 512 + m % 32 * 16 + m / 32 % 4 * 4 + first % 4
                            : ((ts_u64)(m / 8) * groups + first / 4) * 32 + m % 8 * 4 + first % 4;
  return per_chunk == 2 ? __ldg((const ts_u16*)(s.scales + offset)) : __ldg(s.scales + offset);
#elif TS_LAYOUT == 3
  const ts_u32 first = at.within * per_chunk;
  ts_u32 low = __ldg(s.scales + interleaved_offset(s, page, token, at.head, first));
  return per_chunk == 1 ? low : low | __ldg(s.scales + interleaved_offset(s, page, token, at.head, first + 1)) << 8;
#else
  const ts_u32 first = SCALES ? at.within * SCALES : at.within / 2;
  const ts_u8* from = s.scales + head_offset(s, s.scale_strides, page, token, at.head) + first;
  return per_chunk == 2 ? __ldg((const ts_u16*)from) : __ldg(from);
#endif
}

TS_FN void store_scales(const Site& s, const Place& at, ts_u32 scales) {
  if (SCALES == 0 && at.within % 2) return;
  ts_u8* to = s.out_scales;
  if (TS_DENSE)
    to += (ts_u64)at.flat * TS_CHUNK * 2 / TS_BLOCK;
  else
    to += (ts_u64)at.dest * s.width_scales + (SCALES ? at.column * SCALES : at.column / 2);
  if (SCALES == 2)
    *(ts_u16*)to = (ts_u16)scales;
  else
    *to = (ts_u8)scales;
  if (!s.decode || at.column > 0 || (at.row > 0 && !(s.flags & DECODE_A_ROW))) return;
  float g = s.global_scale[s.flags & SCALE_A_ROW ? at.row : 0];
  s.decode[s.flags & DECODE_A_ROW ? at.dest : 0] = s.flags & ENCODE ? e2m1::reciprocal(g) : g;
}

// ---- codes ----------------------------------------------------------------------------------------------------------

struct Chunk {
  ts_u32 w[WORDS];
  ts_u32 scales;
};

TS_FN Chunk load_chunk(const Site& s, const Place& at) {
#if TS_DENSE
  const ts_u32 page = 0, token = 0;
  const ts_u8* from = s.codes + (ts_u64)at.flat * TS_CHUNK;
#else
  const ts_u32 page = TS_SPLIT ? quotient((ts_u32)at.slot, s.page) : (ts_u32)at.slot;
  const ts_u32 token = (ts_u32)at.slot - page * s.page.divisor;
  const ts_u8* from = s.codes + head_offset(s, s.code_strides, page, token, at.head) + at.within * TS_CHUNK;
#endif
  Chunk c;
#if TS_CHUNK == 16
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "l"(from));
#else
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(c.w[0]), "=r"(c.w[1]) : "l"(from));
#endif
  c.scales = load_scales(s, at, page, token);
  return c;
}

// Bit j of eight nibbles in the top byte. The product lines four pairs of bits up there; no two of its terms meet.
TS_FN ts_u32 gather_bit(ts_u32 nibbles, int j) {
  ts_u32 t = (nibbles >> j) & 0x11111111u;
  t = (t | t >> 3) & 0x03030303u;
  return t * 0x01041040u;
}

TS_FN void store_codes(const Site& s, const Place& at, const Chunk& c) {
  const ts_u64 flat = TS_DENSE ? (ts_u64)at.flat : (ts_u64)at.dest * s.chunks_a_row.divisor + at.column;
#if TS_BITS == 4
  ts_u8* to = s.planes + flat * TS_CHUNK;
#if TS_CHUNK == 16
  *(uint4*)to = make_uint4(c.w[0], c.w[1], c.w[2], c.w[3]);
#else
  *(uint2*)to = make_uint2(c.w[0], c.w[1]);
#endif
#else
#pragma unroll
  for (int j = 0; j < TS_BITS; j++) {
    ts_u64 to = flat + ((ts_u64)at.dest * (TS_BITS - 1) + j) * s.chunks_a_row.divisor;
    ts_u32 low = __byte_perm(gather_bit(c.w[0], j), gather_bit(c.w[1], j), 0x0073);
#if TS_CHUNK == 16
    ts_u32 high = __byte_perm(gather_bit(c.w[2], j), gather_bit(c.w[3], j), 0x0073);
    ((ts_u32*)s.planes)[to] = __byte_perm(low, high, 0x5410);
#else
    ((ts_u16*)s.planes)[to] = (ts_u16)low;
#endif
  }
#endif
}

extern "C" __global__ void __launch_bounds__(TS_THREADS) pack_sites(const __grid_constant__ Sites sites) {
  const Site& s = sites.site[blockIdx.y];
  const ts_u32 first = blockIdx.x * (TS_THREADS * TS_FLIGHT) + threadIdx.x;
  Chunk chunk[TS_FLIGHT];
  Place at[TS_FLIGHT];
  // All places before the first load: a slot has to arrive before its codes can be asked for.
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    at[k].slot = at[k].dest = -1;
    if (first + k * TS_THREADS < s.chunks) at[k] = place_of(s, first + k * TS_THREADS);
  }
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++)
    if (kept(at[k])) chunk[k] = load_chunk(s, at[k]);
#pragma unroll
  for (int k = 0; k < TS_FLIGHT; k++) {
    if (!kept(at[k])) continue;
    store_codes(s, at[k], chunk[k]);
    store_scales(s, at[k], chunk[k].scales);
  }
}
