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
// Entry n + (N + 1) (m - n) + (N + 1) d, n = floor(N a / 8), m = ceil(N a / 8), d the displacement of the record: t = a / 8
// saturates at 1, so n goes up to N. N is 32 where every threshold is a multiple of 1/4 (rule paper), else 64: the fewer
// entries, the fewer banks of shared memory have two that a warp wants at once. N + 1, not N, so that lanes with one n but
// other records meet different banks. With u = 2^23 + d + m and f = 2^23 + 2^23 / N + n, floats of one binade whose last bit
// counts 1, the entry is (N + 1) u - N f. Scaled so that the result is a subnormal number, its bits are the byte offset
// itself: three fused multiply-adds from t to the address, record and place of the table included.
const ts_u32 NEGATIVE = 0x80000000u;
TS_FN constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// True where outcomes do not change between multiples of 1/4.
constexpr bool quarters_suffice(int bits, int rule) {
  for (int record = 0; record < 1 << bits; record++)
    for (int place = 1; place < e2m1::PLACES - 1; place++) {
      if (place % 4 == 0 || place % 4 == 3) continue;
      Outcome here = outcome_of(place, record, bits, rule), next = outcome_of(place + 1, record, bits, rule);
      if (here.word[0] != next.word[0] || here.word[1] != next.word[1]) return false;
    }
  return true;
}
constexpr int places_of(int bits, int rule) { return quarters_suffice(bits, rule) ? 32 : 64; }

// size: 4 or 8 bytes an entry. The last bit of u counts an entry, that of f N entries.
TS_FN constexpr ts_u32 upper_bits(int size) { return (ts_u32)(1 + log2_of(size)) << 23; }
TS_FN constexpr ts_u32 lower_bits(int size, int places) {
  return NEGATIVE | (ts_u32)(1 + log2_of(size * places)) << 23 | 0x800000u / places;
}

// Byte offset for t in [0, 1], plus `table`; upper = upper_bits + displacement, lower = lower_bits - table / (N size), table a
// multiple of N entries.
TS_FN ts_u32 offset_of(float t, ts_u32 upper, ts_u32 lower, int size, int places) {
  (void)size;
#ifdef __CUDACC__
  float u = e2m1::multiply_add_up(t, e2m1::of_bits((ts_u32)(places * size)), e2m1::of_bits(upper));
  float f = e2m1::multiply_add_up(t, e2m1::of_bits(NEGATIVE | (ts_u32)(places * places * size)), e2m1::of_bits(lower));
#else
  // Sums of a binade's last bits are exact; C++ has no cheap directed rounding.
  float u = e2m1::of_bits(upper + (ts_u32)std::ceil((double)t * places));
  float f = e2m1::of_bits(lower + (ts_u32)std::floor((double)t * places));
#endif
  return e2m1::bits_of(e2m1::multiply_add(u, (float)(places + 1), f));
}

// Displacement of a record, from bit 1 on: between the parts of two records lies the one between multiples of 1/8. Up to
// three bits the outcomes stand in the table 4 or 2 times, for records that sit higher, so that one shift serves 4 or 2
// elements and masking is all the rest.
TS_FN constexpr int copies(int bits) { return bits == 1 ? 4 : (bits < 4 ? 2 : 1); }
TS_FN constexpr int spread(int record) { return (record & 1) | (record & 2) << 1 | (record & 4) << 2; }
TS_FN constexpr int displaced(int bits, int record, int copy) {
  return (bits == 2 || bits == 3 ? spread(record) : record) << (1 + copy);
}
constexpr int entries(int bits, int places) {
  return (places + 1) * (displaced(bits, (1 << bits) - 1, copies(bits) - 1) + 2);
}

// Place (of 1/16) at entry e of a record's part: n, or N + 1 + n for between n and n + 1.
TS_FN constexpr int place_at(int e, int places) {
  return e % (places + 1) * (128 / places) + (e > places ? 64 / places : 0) > 96
             ? 96
             : e % (places + 1) * (128 / places) + (e > places ? 64 / places : 0);
}

// Exchanges bit p of the word with bit p + distance, for the p in `which`.
TS_FN ts_u32 exchanged(ts_u32 w, ts_u32 distance, ts_u32 which) {
  ts_u32 t = (w ^ w >> distance) & which;
  return w ^ t ^ t << distance;
}

// Byte `half` of three 16-bit words, in order, and 0.
TS_FN ts_u32 bytes_of(const ts_u32* plane, int half) {
#ifdef __CUDACC__
  ts_u32 two = __byte_perm(plane[0], plane[1], half ? 0x0051 : 0x0040);
  return __byte_perm(two, plane[2], half ? 0x7510 : 0x7410);
#else
  return (plane[0] >> 8 * half & 255u) | (plane[1] >> 8 * half & 255u) << 8 | (plane[2] >> 8 * half & 255u) << 16;
#endif
}

// The records of 16 elements in the order that upper_of reads. Planes become groups of an element's bits by exchanging
// the number of the plane with bits of the number of the element: 5 instructions for 16 records of two bits, 20 for
// three, where spreading each plane took 28 and 42.
struct Records {
  ts_u32 word[2];
};

// plane[j]: 16 bits of plane j; with whole codes plane[h] holds 8 nibbles.
TS_FN Records arrange(const ts_u32* plane, int bits) {
  Records r = {{plane[0], 0}};
  if (bits == 2) r.word[0] = exchanged(plane[0] | plane[1] << 16, 14, 0x0000CCCCu);
  if (bits == 3)
    for (int half = 0; half < 2; half++)
      r.word[half] = exchanged(exchanged(bytes_of(plane, half), 12, 0x0000F0F0u), 6, 0x00CC00CCu);
  if (bits == 4) r.word[1] = plane[1];
  return r;
}

// Where in its word the group of element i of 16 begins: 4 elements of one bit, 2 of two or three bits, one whole code.
TS_FN constexpr int group_of(int i, int bits) {
  return bits == 1   ? (i & 12)
         : bits == 2 ? (i >> 1 & 1) * 16 + (i >> 3) * 8 + (i >> 2 & 1) * 4
         : bits == 3 ? (i >> 2 & 1) * 16 + (i >> 1 & 1) * 8
                     : (i & 7) * 4;
}

// upper for element i of 16. base = upper_bits(size), on the device opaque to the compiler, which would mask and set in
// two instructions where one takes both.
TS_FN ts_u32 upper_of(const Records& records, int i, int bits, ts_u32 base) {
  ts_u32 word = records.word[bits > 2 ? i >> 3 : 0], mask = (ts_u32)displaced(bits, (1 << bits) - 1, i % copies(bits));
  ts_u32 shifted = group_of(i, bits) == 0 ? word << 1 : word >> (group_of(i, bits) - (group_of(i, bits) > 0));
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
