// E2M1 decisions shared by every kernel, bit for bit those of trace_store.codebook.
//
// Compiles as CUDA (NVRTC, nvcc) and as plain C++, so that a test without a GPU compares it with the NumPy oracle over
// every bfloat16 value, scale byte and record. No header is included: NVRTC needs none, a C++ user supplies
// <cstdint>, <cstring> and <cmath>.
//
//     s = fp32(block scale) * tensor scale    inv = 1 / s    z = x * inv    a = |z|    y = sign(z) * v * s
//
// Keys. A magnitude is compared as an integer: key(a) = the bits of a * 2^-126. That moves 1.0 to the smallest normal
// float, so 0 and .5 become subnormals and key >> 22 is the index k of the bracket [v_k, v_k+1) for every a, with no
// special case below 1: 0 .5 1 1.5 2 3 4 6 have keys k << 22. Below 1 the product is rounded to multiples of 2^-23, one
// bit short of float32, so the direction matters: toward zero it keeps the bracket, upward it keeps "a > v_k" (and
// "a > 0"). Each rule below says which of the two keys it reads; together they decide exactly what comparisons on a
// would. Multiplications by powers of two cost FMA slots, of which a memory-bound kernel has plenty, where a select or a
// comparison would cost the busier integer pipe.
#pragma once

#ifdef __CUDACC__
#define TS_FN __device__ __forceinline__
typedef unsigned char ts_u8;
typedef unsigned short ts_u16;
typedef unsigned int ts_u32;
typedef unsigned long long ts_u64;
#else
#define TS_FN static inline
typedef uint8_t ts_u8;
typedef uint16_t ts_u16;
typedef uint32_t ts_u32;
typedef uint64_t ts_u64;
#endif

namespace e2m1 {

#ifdef __CUDACC__
TS_FN ts_u32 bits_of(float f) { return __float_as_uint(f); }
TS_FN float of_bits(ts_u32 u) { return __uint_as_float(u); }
TS_FN float reciprocal(float s) { return __frcp_rn(s); }
TS_FN float divide(float a, float b) { return __fdiv_rn(a, b); }
TS_FN float saturate(float f) { return __saturatef(f); }
TS_FN int key_down(float a) { return __float_as_int(__fmul_rz(a, 1.17549435e-38f)); }
TS_FN int key_up(float a) { return __float_as_int(__fmul_ru(a, 1.17549435e-38f)); }
TS_FN float multiply(float a, float b) { return __fmul_rn(a, b); }
TS_FN float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TS_FN float add(float a, float b) { return __fadd_rn(a, b); }
#else
TS_FN ts_u32 bits_of(float f) {
  ts_u32 u;
  memcpy(&u, &f, 4);
  return u;
}
TS_FN float of_bits(ts_u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
TS_FN float reciprocal(float s) { return 1.0f / s; }
TS_FN float divide(float a, float b) { return a / b; }
TS_FN float saturate(float f) { return f > 1.0f ? 1.0f : (f > 0.0f ? f : 0.0f); }
// 2^23 * a is the number of subnormal steps; the cast truncates and the double is exact.
TS_FN int key_down(float a) {
  return bits_of(a) >= 0x3F800000u ? (int)(bits_of(a) - 0x3F000000u) : (int)((double)a * 8388608.0);
}
TS_FN int key_up(float a) {
  int down = key_down(a);
  return bits_of(a) < 0x3F800000u && (double)a * 8388608.0 != (double)down ? down + 1 : down;
}
TS_FN float multiply(float a, float b) { return a * b; }
TS_FN float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
TS_FN float add(float a, float b) { return a + b; }
#endif

const ts_u32 MAGNITUDE_BITS = 0x7FFFFFFFu;
const ts_u32 SIGN_BIT = 0x80000000u;
const ts_u32 INFINITY_BITS = 0x7F800000u;
const float FLT_MAX_ = 3.402823466e38f;
const float FULL_RANGE = 448.0f * 6.0f;
const float SIXTH = 1.0f / 6.0f;
const float BELOW_SIX = 5.9999995f;  // largest float below 6: a bracket never starts above 4
const int STEP = 1 << 22;            // one magnitude index, as a key
const int BINADE = 0xFF800000;

TS_FN float magnitude(float f) { return of_bits(bits_of(f) & MAGNITUDE_BITS); }
TS_FN bool finite(float f) { return (bits_of(f) & MAGNITUDE_BITS) < INFINITY_BITS; }
TS_FN float nan_value() { return of_bits(0x7FC00000u); }
TS_FN float with_sign_of(float f, float sign) { return of_bits(bits_of(f) | (bits_of(sign) & SIGN_BIT)); }
TS_FN float smaller(float a, float b) { return a < b ? a : b; }
TS_FN int smaller(int a, int b) { return a < b ? a : b; }
TS_FN int larger(int a, int b) { return a > b ? a : b; }

// Magnitude of a key with its low 22 bits clear. Exact.
TS_FN float value_of_key(int key) { return multiply(of_bits((ts_u32)key), 8.50705917e37f); }
TS_FN float value_of_index(int k) { return value_of_key(k << 22); }

// ---- block scales ---------------------------------------------------------------------------------------------------

// E4M3 byte to float. The seven low bits are a float's exponent and mantissa 120 binades too low, subnormals included.
TS_FN float decode_e4m3(ts_u32 byte) {
  if ((byte & 0x7F) == 0x7F) return nan_value();
  return of_bits(bits_of(multiply(of_bits((byte & 0x7F) << 20), 1.329227995784916e36f)) | ((byte & 0x80) << 24));
}

// E8M0 byte to float: 2^(byte - 127), 255 is NaN.
TS_FN float decode_e8m0(ts_u32 byte) {
  if (byte == 255) return nan_value();
  return of_bits(byte ? byte << 23 : 0x00400000u);
}

// E4M3 byte of v >= 0, to nearest, ties to even, saturating at 448 (also for inf). v is no NaN.
TS_FN ts_u32 encode_e4m3(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  ts_u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return pair;
#else
  v = smaller(v, 448.0f);
  ts_u32 u = bits_of(v);
  // Below 2^-6 steps are 2^-9; adding 2^14, whose last bit is 2^-9, rounds there.
  if (v < 0.015625f) return bits_of(add(v, 16384.0f)) & 15u;
  return ((u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20) - 960u;
#endif
}

// E8M0 byte of the OCP rule: floor(log2(amax)) - 2, clamped to 0; 0 for 0. amax is finite.
TS_FN ts_u32 encode_e8m0(float amax) { return bits_of(multiply(amax, 0.25f)) >> 23; }

// s = block scale * tensor scale, NaN where the product is no finite number.
TS_FN float total_scale(float block_scale, float tensor_scale) {
  float s = multiply(block_scale, tensor_scale);
  return finite(s) ? s : nan_value();
}

// ---- rounding to nearest --------------------------------------------------------------------------------------------

// 2^23 + k with k = index of the nearest magnitude, ties to the even index, 7 above 5; a >= 0, inf allowed.
// Three ramps with slopes 2, 1 and 1/2 meet at 2 and 4; their sum is the index as a real number, and adding it to 2^23,
// where floats are integers, rounds to the even neighbour. Seven FMA slots and no comparison.
TS_FN float nearest_magic(float a) {
  float low = saturate(multiply(a, 0.5f));
  float middle = saturate(multiply_add(a, 0.5f, -1.0f));
  float high = saturate(multiply_add(a, 0.5f, -2.0f));
  float m = multiply_add(low, 4.0f, 8388608.0f);
  m = multiply_add(middle, 2.0f, m);
  return add(m, high);
}
TS_FN int nearest_index(float a) { return (int)(bits_of(nearest_magic(a)) & 7u); }
// The exponent bits of 2^23 leave the word, so the shift alone gives the key.
TS_FN int nearest_key(float a) { return (int)(bits_of(nearest_magic(a)) << 22); }

// ---- guided rounding ------------------------------------------------------------------------------------------------
// Every rule is: clamp the reconstructed codeword to the ends of the bracket. `a` is below 6 (BELOW_SIX caps it).
// x = 0 must give 0 whatever the record: key_up is 0 for a = 0 alone.

// One recorded bit, c = bit << 22. Codewords with the bit are 0 1 2 4 or .5 1.5 3 6; the nearest one changes at
//     bit 0   a > .5, > 1.5, > 3                       ties stay on z's own codeword: the lower bracket end wins below
//     bit 1   a > 1, >= 2.25, >= 4.5  (rule paper)     a > 1, > 2.125, > 4.25  (rule cell)
// and is never above the bracket, so one maximum clamps it. With the key at hand, "round up to the next multiple of
// 2^23, then or the bit in" does the first line and the first threshold of the second; `band` (BAND_PAPER, BAND_CELL)
// delays the other two. For a = 0 and bit 1 the sum is negative, and the maximum gives 0.
const int BAND_PAPER = 0x100000;
const int BAND_CELL = 0x080001;
TS_FN int guided_key_1(float a, int c, int band) {
  int up = key_up(a);
  int nearest = up + (STEP - 1) - c;
  if (c) nearest = smaller(nearest, larger(up - band, 2 * (2 * STEP) - 1));
  return larger((nearest & BINADE) | c, key_down(a) & ~(STEP - 1));
}

// The bracket of a and the clamp. wanted = key of the reconstructed codeword.
TS_FN int clamp_to_bracket(float a, int wanted) {
  int low = key_down(a) & ~(STEP - 1);
  int clamped = smaller(larger(wanted, low), low + STEP);
  return key_up(a) == 0 ? 0 : clamped;
}

// Two recorded bits, c = bits << 22: codewords c and c + 4 steps; the second from these keys on.
//     paper   a > 1, >= 1.75, >= 2.5, >= 3.75          cell   a > 1, > 1.625, > 2.375, > 3.375
TS_FN int guided_key_2(float a, int c, int band) {
  bool cell = band == BAND_CELL;
  int first = cell ? (c & STEP ? 0x0D00001 : 0x0800001) : (c & STEP ? 0x0E00000 : 0x0800001);
  int second = cell ? (c & STEP ? 0x1580001 : 0x1180001) : (c & STEP ? 0x1700000 : 0x1200000);
  int from = c & (2 * STEP) ? second : first;
  return clamp_to_bracket(a, key_up(a) >= from ? c + 4 * STEP : c);
}

// Three recorded bits are the magnitude; a whole code on the other side of zero clamps to the lower end.
TS_FN int guided_key_3(float a, int c) { return clamp_to_bracket(a, c); }
TS_FN int guided_key_4(float a, ts_u32 code, float z) {
  bool opposite = ((code >> 3) & 1u) != (bits_of(z) >> 31);
  return clamp_to_bracket(a, opposite ? 0 : (int)((code & 7u) << 22));
}

// Key of the chosen magnitude. bits 0 is rounding to nearest; record = the recorded code bits.
TS_FN int choose_key(float z, ts_u32 record, int bits, int band) {
  float a = magnitude(z);
  if (bits == 0) return nearest_key(a);
  a = smaller(a, BELOW_SIX);
  if (bits == 1) return guided_key_1(a, (int)(record << 22), band);
  if (bits == 2) return guided_key_2(a, (int)(record << 22), band);
  if (bits == 3) return guided_key_3(a, (int)(record << 22));
  return guided_key_4(a, record, z);
}

// Where the short form below is exact: s a normal positive number with a finite reciprocal, and small enough that no
// bfloat16 or float16 x other than 0 vanishes in x * inv (2^-133 / 2^16 is above 2^-150).
TS_FN bool ordinary(float s) { return bits_of(s) - 0x00800000u < 0x47800000u - 0x00800000u; }

// y for finite x under an ordinary scale. z + 0 turns -0 into +0, so that x = -0 gives +0.
TS_FN float round_ordinary(float x, float s, float inv, ts_u32 record, int bits, int band) {
  float z = multiply_add(x, inv, 0.0f);
  return with_sign_of(multiply(value_of_key(choose_key(z, record, bits, band)), s), z);
}

// y for any x and s, the definition in the oracle's order.
TS_FN float round_any(float x, float s, ts_u32 record, int bits, int band) {
  if (!finite(x) || !finite(s)) return nan_value();
  if (s == 0.0f || x == 0.0f) return 0.0f;
  float z = multiply(x, reciprocal(s));
  // A product that underflows to 0 is still a z above 0; the smallest subnormal decides the same way.
  if ((bits_of(z) & MAGNITUDE_BITS) == 0) z = with_sign_of(of_bits(1), z);
  float v = value_of_key(choose_key(z, record, bits, band));
  return multiply(with_sign_of(v, z), s);
}

// ---- quantizing -----------------------------------------------------------------------------------------------------

// Encode scale of a tensor or row with this maximum, and of a given decode scale.
TS_FN float encode_scale(float amax) { return amax == 0.0f ? 1.0f : smaller(divide(FULL_RANGE, amax), FLT_MAX_); }
TS_FN float encode_scale_of(float decode) { return smaller(reciprocal(decode), FLT_MAX_); }

// Scale byte of a block with maximum amax, and the multiplier that takes x to code space; 0 where the scale is 0.
TS_FN ts_u32 block_scale_e4m3(float amax, float encode, float* multiplier) {
  ts_u32 byte = encode_e4m3(multiply(amax, multiply(encode, SIXTH)));
  float s = multiply(decode_e4m3(byte), reciprocal(encode));
  *multiplier = s == 0.0f ? 0.0f : smaller(reciprocal(s), FLT_MAX_);
  return byte;
}
TS_FN ts_u32 block_scale_e8m0(float amax, float* multiplier) {
  ts_u32 byte = encode_e8m0(amax);
  *multiplier = reciprocal(decode_e8m0(byte));
  return byte;
}

// Code 0 to 15 of finite x; the sign is kept on underflow.
TS_FN ts_u32 quantize_code(float x, float multiplier) {
  float z = multiply(x, multiplier);
  return (ts_u32)nearest_index(magnitude(z)) | ((bits_of(z) >> 31) << 3);
}

}  // namespace e2m1
