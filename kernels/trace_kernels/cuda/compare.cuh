// What a comparison with a record counts, as one table look-up an element. Plain C++14 too, as e2m1.cuh.
//
// The outcome of an element depends on its place and record alone, so the table holds all counts of it in bit fields. They
// add up over 8 elements without overflow, whatever the sum of the bits above them does:
//
//     word 0   bits 31..22  guided magnitude v: its upper float bits, all it has
//              bits  3..0 raised, 7..4 mismatched, 11..8 lowered, 15..12 left
//              bits 1..3 bits of record:  21..16  extra E, with 4 (nearest - guided)^2 = raised + lowered + 3 E
//              4 bits of record:          19..16  adjacent
//     word 1   4 bits of record only:     13..0   4 (nearest - reference)^2, 27..14 4 (guided - reference)^2, 31..28 flipped
//
// With fewer than 4 bits the reference is the guided codeword, and a moved element is always mismatched and adjacent: if
// the nearest codeword has the recorded bits, guidance keeps it.
#pragma once
#include "e2m1.cuh"

namespace compare {

const ts_u32 MAGNITUDE = 0xFFC00000u, FIELDS_A = 0x003F0F0Fu, FIELDS_B = 0x0000F0F0u;
const int RAISED = 0, MISMATCHED = 4, LOWERED = 8, LEFT = 12, EXTRA = 16, ADJACENT = 16;
const int REFERENCE_SHIFT = 14, FLIPPED = 28;
const ts_u32 REFERENCE_MASK = 0x3FFFu;

// Upper float bits of v_k.
constexpr ts_u32 magnitude_bits(int k) {
  return k == 0 ? 0u : (k == 1 ? 0x3F000000u : 0x3F800000u + ((ts_u32)(k - 2) << 22));
}
constexpr int halves(int k) { return k < 0 ? -e2m1::codeword(-k) / 8 : e2m1::codeword(k) / 8; }
constexpr ts_u32 squared(int difference) { return (ts_u32)(difference * difference); }

struct Outcome {
  ts_u32 word[2];
};

// Of place 0 to 96 (multiples of 1/16; odd: between multiples of 1/8; 0 is x = 0, which rounds to 0).
constexpr Outcome outcome_of(int place, int record, int bits, int rule) {
  int n = e2m1::nearest_of(place), g = place == 0 ? 0 : e2m1::guided_index(place, record, bits, rule);
  ts_u32 raised = g > n, lowered = g < n, word = magnitude_bits(g) | raised << RAISED | lowered << LOWERED;
  if (bits < 4) {
    int period = 1 << bits;
    word |= (ts_u32)(n % period != record) << MISMATCHED | (ts_u32)(g % period != record) << LEFT;
    if (g != n) word |= ((squared(halves(n) - halves(g)) - 1) / 3) << EXTRA;
    return Outcome{{word, 0}};
  }
  int r = record < 8 ? record : 8 - record;
  bool adjacent = n - r == 1 || r - n == 1;
  word |= (ts_u32)(n != r) << MISMATCHED | (ts_u32)(g != r) << LEFT | (ts_u32)adjacent << ADJACENT;
  ts_u32 second = squared(halves(n) - halves(r)) | squared(halves(g) - halves(r)) << REFERENCE_SHIFT;
  return Outcome{{word, second | (ts_u32)(r < 0) << FLIPPED}};
}

// Outcomes by record and place.
template <int BITS, int RULE>
struct Outcomes {
  static const int WORDS = BITS == 4 ? 2 : 1;
  ts_u32 word[(1 << BITS) * e2m1::PLACES * WORDS];
  constexpr Outcomes() : word() {
    for (int record = 0; record < 1 << BITS; record++)
      for (int place = 0; place < e2m1::PLACES; place++) {
        Outcome outcome = outcome_of(place, record, BITS, RULE);
        for (int w = 0; w < WORDS; w++) word[(record * e2m1::PLACES + place) * WORDS + w] = outcome.word[w];
      }
  }
};

// ---- where an outcome is, in shared memory --------------------------------------------------------------------------
//
// Entry n + 128 (m - n) + 128 d, n = floor(8 a), m = ceil(8 a), d the displacement of the record, n up to 64: t = a / 8
// saturates at 1. With u = (127 M + d) + m and f = 128 M + n, floats of one binade whose last bit counts 1, the entry is
// 128 (u - 127/128 f). Scaled so that the result is a subnormal number, its bits are the byte offset itself: three fused
// multiply-adds from t to the address, record included.
const int BLOCK = 128, SATURATED = 64;
const ts_u32 UPPER = 12484608u - 8388608u, LOWER = 12582912u - 8388608u;  // 127 M, 128 M with M = 98,304, less 2^23

// size: 4 or 8 bytes an entry. The last bit of u counts 128 entries, 2^-140 or 2^-139.
TS_FN constexpr ts_u32 upper_bits(int size) { return ((size == 8 ? 11u : 10u) << 23) | UPPER; }
TS_FN constexpr ts_u32 lower_bits(int size) { return ((size == 8 ? 11u : 10u) << 23) | LOWER; }
TS_FN constexpr ts_u32 eighths_bits(int size) { return size == 8 ? 0x10000u : 0x8000u; }  // 64 last bits

// Byte offset for t in [0, 1]; upper = upper_bits(size) + displacement.
TS_FN ts_u32 offset_of(float t, ts_u32 upper, int size) {
#ifdef __CUDACC__
  float c = e2m1::of_bits(eighths_bits(size));
  float u = e2m1::multiply_add_up(t, c, e2m1::of_bits(upper));
  float f = e2m1::multiply_add_down(t, c, e2m1::of_bits(lower_bits(size)));
#else
  // Sums of a binade's last bits are exact; C++ has no cheap directed rounding.
  float u = e2m1::of_bits(upper + (ts_u32)std::ceil((double)t * 64.0));
  float f = e2m1::of_bits(lower_bits(size) + (ts_u32)std::floor((double)t * 64.0));
#endif
  return e2m1::bits_of(e2m1::multiply_add(f, -0.9921875f, u));
}

// One bit: the record bit of element i sits at bit 1 + i % 4 of the displacement, so that masking it is all there is to
// do, and the outcomes of record 1 stand in the table four times. More bits: the record is at bits 1 and up.
TS_FN constexpr int displaced(int bits, int record, int copy) { return bits == 1 ? record << (1 + copy) : record << 1; }
constexpr int entries(int bits) { return BLOCK * ((bits == 1 ? 16 : ((1 << bits) - 1) * 2) + 1) + SATURATED; }

// Place at entry e of a record's part, 0 to 64 or 128 to 191, or -1.
TS_FN constexpr int place_at(int e) {
  return e % BLOCK > SATURATED || e / BLOCK > 1 ? -1
         : 2 * (e % BLOCK) + e / BLOCK > 96     ? 96
                                                : 2 * (e % BLOCK) + e / BLOCK;
}

// A byte's bits spread to every fourth bit.
TS_FN ts_u32 nibbles_of(ts_u32 byte) {
  ts_u32 w = (byte | byte << 12) & 0x000F000Fu;
  w = (w | w << 6) & 0x03030303u;
  return (w | w << 3) & 0x11111111u;
}

// upper for element i; record: the byte of a plane (1 bit), else a nibble an element. base = upper_bits(size), on the
// device opaque to the compiler, which would mask and set in two instructions where one takes both.
TS_FN ts_u32 upper_of(ts_u32 record, int i, int bits, ts_u32 base) {
  ts_u32 mask = bits == 1 ? 2u << (i % 4) : ((1u << bits) - 1u) << 1;
  ts_u32 shifted = bits == 1 ? (i < 4 ? record << 1 : record >> 3) : (i == 0 ? record << 1 : record >> (4 * i - (i > 0)));
#ifdef __CUDACC__
  ts_u32 upper;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(upper) : "r"(shifted), "r"(mask), "r"(base));
  return upper;
#else
  return (shifted & mask) | base;
#endif
}

// Where the short form is exact: s normal, positive and so small that no bfloat16 or float16 x but 0 vanishes in x / (8 s).
TS_FN bool ordinary(float s) { return e2m1::bits_of(s) - 0x00800000u < 0x46000000u - 0x00800000u; }

// 0 to 96 for any x, in the oracle's order: the long form.
TS_FN int place_of(float x, float inv) {
  if (e2m1::is_zero(x)) return 0;
  ts_u32 entry = e2m1::place_offset(e2m1::capped(e2m1::multiply(x, inv))) / 4;
  int place = (int)(2 * (entry % e2m1::BETWEEN) + entry / e2m1::BETWEEN);
  return place ? place : 1;  // a product that underflows to 0 is still above 0
}

}  // namespace compare
