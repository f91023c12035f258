// Moving activation rows: 8 elements a unit, 16-byte accesses, row and column from a flat unit number.
//
// Compile-time switches, set by trace_kernels._module:
//     TS_INPUT   type of x and y: 0 bfloat16, 1 float16, 2 float32
//     TS_BLOCK   elements a scale covers, 16 or 32
//     TS_E8M0    1: scales are E8M0, 0: E4M3
#pragma once
#include "e2m1.cuh"

namespace rows {

const int UNIT = 8;
const int UNITS_A_BLOCK = TS_BLOCK / UNIT;
#if TS_INPUT == 2
const int WORDS = 8;
#else
const int WORDS = 4;
#endif

struct Unit {
  ts_u32 w[WORDS];
};

// x is read once and y is written once: both stream past L2's useful lines.
TS_FN void load_words(ts_u32* w, const void* from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(from));
}
TS_FN void store_words(void* to, const ts_u32* w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

TS_FN Unit load_unit(const ts_u8* x, ts_u64 element) {
  Unit unit;
#pragma unroll
  for (int part = 0; part < WORDS; part += 4) load_words(unit.w + part, x + element * (WORDS / 2) + part * 4);
  return unit;
}
TS_FN void store_unit(ts_u8* y, ts_u64 element, const Unit& unit) {
#pragma unroll
  for (int part = 0; part < WORDS; part += 4) store_words(y + element * (WORDS / 2) + part * 4, unit.w + part);
}

// Element i as float32, exact.
TS_FN float element(const Unit& unit, int i) {
#if TS_INPUT == 0
  ts_u32 w = unit.w[i / 2];
  return e2m1::of_bits(i % 2 ? w & 0xFFFF0000u : w << 16);
#elif TS_INPUT == 1
  float f;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "h"((ts_u16)(unit.w[i / 2] >> (16 * (i % 2)))));
  return f;
#else
  return e2m1::of_bits(unit.w[i]);
#endif
}

// Elements i and i + 1 (i even), rounded once to the type, ties to even; float16 overflows to infinity.
TS_FN void set_elements(Unit& unit, int i, float low, float high) {
#if TS_INPUT == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(unit.w[i / 2]) : "f"(high), "f"(low));
#elif TS_INPUT == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(unit.w[i / 2]) : "f"(high), "f"(low));
#else
  unit.w[i] = e2m1::bits_of(low);
  unit.w[i + 1] = e2m1::bits_of(high);
#endif
}

// Sign bits of a unit, element i at bit 4 i + 3.
TS_FN ts_u32 sign_nibbles(const Unit& x) {
#if TS_INPUT == 2
  ts_u32 low = __byte_perm(__byte_perm(x.w[0], x.w[2], 0x0073), __byte_perm(x.w[4], x.w[6], 0x0073), 0x5410);
  ts_u32 high = __byte_perm(__byte_perm(x.w[1], x.w[3], 0x0073), __byte_perm(x.w[5], x.w[7], 0x0073), 0x5410);
#else
  ts_u32 first = __byte_perm(x.w[0], x.w[1], 0x7531), last = __byte_perm(x.w[2], x.w[3], 0x7531);
  ts_u32 low = __byte_perm(first, last, 0x6420), high = __byte_perm(first, last, 0x7531);
#endif
  return ((low >> 4) & 0x08080808u) | (high & 0x80808080u);
}

// The larger magnitude of two words, per half for 16-bit types; NaN wins. The sign of the result says nothing.
TS_FN ts_u32 larger_magnitudes(ts_u32 a, ts_u32 b) {
  ts_u32 r;
#if TS_INPUT == 2
  r = max(a & e2m1::MAGNITUDE_BITS, b & e2m1::MAGNITUDE_BITS);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
#if TS_INPUT == 0
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
#elif TS_INPUT == 0
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#else
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#endif
  return r;
}

// Bits of max |x| as float32; infinity and NaN are at INFINITY_BITS and above.
TS_FN ts_u32 largest_magnitude(const Unit& unit) {
  ts_u32 largest = unit.w[0];
#pragma unroll
  for (int i = 1; i < WORDS; i++) largest = larger_magnitudes(largest, unit.w[i]);
#if TS_INPUT != 2
  Unit pair;
  pair.w[0] = larger_magnitudes(largest, __byte_perm(largest, 0, 0x1032));
  largest = e2m1::bits_of(element(pair, 0));
#endif
  return largest & e2m1::MAGNITUDE_BITS;
}

// 0 * x is a zero for a number and NaN for infinity and NaN, so a chain of fused multiply-adds carries any of them to the
// end: half the cost of comparing exponents, and on the less busy pipe.
TS_FN bool all_finite(const Unit& unit) {
  ts_u32 sum = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
#if TS_INPUT == 0
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(unit.w[i]), "r"(0));
#elif TS_INPUT == 1
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(unit.w[i]), "r"(0));
#else
    asm("fma.rn.f32 %0, %1, %2, %0;" : "+r"(sum) : "r"(unit.w[i]), "r"(0));
#endif
  }
  return (sum & (TS_INPUT == 2 ? 0x7FFFFFFFu : 0x7FFF7FFFu)) == 0;
}

TS_FN float decode_scale_byte(ts_u32 byte) {
#if TS_E8M0
  return e2m1::decode_e8m0(byte);
#else
  return e2m1::decode_e4m3(byte);
#endif
}

// n / divisor for n < 2^31, with the multiplier and shift that trace_kernels._launch computes.
struct Divisor {
  ts_u32 divisor, multiplier, shift;
};
TS_FN ts_u32 quotient(ts_u32 n, const Divisor& d) { return d.divisor == 1 ? n : __umulhi(n, d.multiplier) >> d.shift; }

}  // namespace rows
