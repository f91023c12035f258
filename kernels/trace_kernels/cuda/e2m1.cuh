// E2M1 decisions shared by every kernel, bit for bit those of trace_store.codebook.
//
// Compiles as CUDA (NVRTC, nvcc) and as plain C++14, so that a test without a GPU compares it with the NumPy oracle over
// every bfloat16 value, scale byte and record. No header is included: NVRTC needs none, a C++ user supplies
// <cstdint>, <cstring> and <cmath>.
//
//     s = fp32(block scale) * tensor scale    inv = 1 / s    z = x * inv    a = min(|z|, 6)    y = sign(z) * v * s
//
// Places. Every threshold of rounding and guidance is a multiple of 1/8 not above 6, so a decision depends on a only
// through n = floor(8 a) and m = ceil(8 a), equal on a multiple and neighbours between two. A table, built below at
// compile time from the definitions in integers of 1/16, holds the outcome for each record and place: about 12
// instructions an element whatever the number of recorded bits, where comparisons took 17 (one bit) to 31 (two bits).
//
// Arithmetic on the device is written as PTX instructions without .ftz, because CuPy compiles everything with -ftz=true,
// which would flush the subnormal scales, reciprocals and products that the definition keeps.
#pragma once

#ifdef __CUDACC__
#define TS_FN __device__ __forceinline__
#define TS_CONSTANT static __device__ const
typedef unsigned char ts_u8;
typedef unsigned short ts_u16;
typedef unsigned int ts_u32;
typedef unsigned long long ts_u64;
#else
#define TS_FN static inline
#define TS_CONSTANT static const
typedef uint8_t ts_u8;
typedef uint16_t ts_u16;
typedef uint32_t ts_u32;
typedef uint64_t ts_u64;
#endif

namespace e2m1 {

#ifdef __CUDACC__
#define TS_ASM1(name, op)                               \
  TS_FN float name(float a) {                           \
    float r;                                            \
    asm(op " %0, %1;" : "=f"(r) : "f"(a));              \
    return r;                                           \
  }
#define TS_ASM2(name, op)                               \
  TS_FN float name(float a, float b) {                  \
    float r;                                            \
    asm(op " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));  \
    return r;                                           \
  }
#define TS_ASM3(name, op)                                             \
  TS_FN float name(float a, float b, float c) {                       \
    float r;                                                          \
    asm(op " %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));    \
    return r;                                                         \
  }
TS_ASM1(magnitude, "abs.f32")
TS_ASM1(negated, "neg.f32")
TS_ASM1(reciprocal, "rcp.rn.f32")
TS_ASM2(divide, "div.rn.f32")
TS_ASM2(multiply, "mul.rn.f32")
TS_ASM2(multiply_saturated, "mul.rn.sat.f32")
TS_ASM2(add, "add.rn.f32")
TS_ASM2(smaller, "min.f32")
TS_ASM3(multiply_add, "fma.rn.f32")
TS_ASM3(multiply_add_saturated, "fma.rn.sat.f32")
TS_ASM3(multiply_add_down, "fma.rz.f32")
TS_ASM3(multiply_add_up, "fma.rp.f32")
TS_FN ts_u32 bits_of(float f) { return __float_as_uint(f); }
TS_FN float of_bits(ts_u32 u) { return __uint_as_float(u); }

// 1 / s for a normal s below 2^126: the seed of the hardware and one Newton step, which is what rcp.rn does there after
// checking the range. A test compares all mantissas.
TS_FN float reciprocal_ordinary(float s) {
  float seed;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(s));
  return multiply_add(seed, multiply_add(negated(s), seed, 1.0f), seed);
}
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
TS_FN float saturate(float f) { return f > 1.0f ? 1.0f : (f > 0.0f ? f : 0.0f); }
TS_FN float magnitude(float f) { return std::fabs(f); }
TS_FN float negated(float f) { return -f; }
TS_FN float reciprocal(float s) { return 1.0f / s; }
TS_FN float reciprocal_ordinary(float s) { return 1.0f / s; }
TS_FN float divide(float a, float b) { return a / b; }
TS_FN float multiply(float a, float b) { return a * b; }
TS_FN float multiply_saturated(float a, float b) { return saturate(a * b); }
TS_FN float add(float a, float b) { return a + b; }
TS_FN float smaller(float a, float b) { return a < b ? a : b; }
TS_FN float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
TS_FN float multiply_add_saturated(float a, float b, float c) { return saturate(std::fma(a, b, c)); }
// Used for places alone: 0 <= a <= 6 and a result in [2, 4), where floats are multiples of 2^-22.
TS_FN float multiply_add_down(float a, float b, float c) {
  return (float)(std::floor((double)a * b * 4194304.0) / 4194304.0 + c);
}
TS_FN float multiply_add_up(float a, float b, float c) {
  return (float)(std::ceil((double)a * b * 4194304.0) / 4194304.0 + c);
}
#endif

const ts_u32 MAGNITUDE_BITS = 0x7FFFFFFFu;
const ts_u32 SIGN_BIT = 0x80000000u;
const ts_u32 INFINITY_BITS = 0x7F800000u;
const float TWO_23 = 8388608.0f;
const float FLT_MAX_ = 3.402823466e38f;
const float FULL_RANGE = 448.0f * 6.0f;
const float SIXTH = 1.0f / 6.0f;

TS_FN bool is_zero(float f) { return (bits_of(f) & MAGNITUDE_BITS) == 0; }
TS_FN bool finite(float f) { return (bits_of(f) & MAGNITUDE_BITS) < INFINITY_BITS; }
TS_FN float nan_value() { return of_bits(0x7FC00000u); }
TS_FN float with_sign_of(float f, float sign) { return of_bits(bits_of(f) | (bits_of(sign) & SIGN_BIT)); }

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

// ---- rounding to nearest --------------------------------------------------------------------------------------------

// 2^23 + k with k = index of the nearest magnitude, ties to the even index, 7 above 5; a >= 0, inf allowed.
// Three ramps with slopes 2, 1 and 1/2 meet at 2 and 4; their sum is the index as a real number, and adding it to 2^23,
// where floats are integers, rounds to the even neighbour. Six fused multiply-adds and no comparison.
TS_FN float nearest_magic(float a) {
  float low = multiply_saturated(a, 0.5f);
  float middle = multiply_add_saturated(a, 0.5f, -1.0f);
  float high = multiply_add_saturated(a, 0.5f, -2.0f);
  float m = multiply_add(low, 4.0f, TWO_23);
  m = multiply_add(middle, 2.0f, m);
  return add(m, high);
}

// Magnitude v_k from 2^23 + k: k << 22 are the bits of v_k * 2^-126, a subnormal for k = 1. The shift drops the exponent.
TS_FN float magnitude_of_magic(float magic) { return multiply(of_bits(bits_of(magic) << 22), 8.50705917e37f); }
TS_FN float nearest_magnitude(float a) { return magnitude_of_magic(nearest_magic(a)); }

// ---- guided rounding ------------------------------------------------------------------------------------------------

const int PLACES = 97;   // multiples of 1/16 from 0 to 6
const int BETWEEN = 64;  // entry n: a = n / 8; entry n + BETWEEN: a in (n / 8, (n + 1) / 8)
const int STRIDE = 128;  // entries from record to record
enum Rule { PAPER = 0, CELL = 1, BRACKET = 2 };

// 2^30 + n and 2^30 + m: in [2, 4) the last bit of a float is 2^-22, an eighth of which a * 2^-19 counts in. Between
// multiples entries run over n, so that 32 lanes spread over all banks of shared memory.
TS_FN ts_u32 floor_bits(float a) { return bits_of(multiply_add_down(a, 1.9073486328125e-6f, 2.0f)); }
TS_FN ts_u32 ceiling_bits(float a) { return bits_of(multiply_add_up(a, 1.9073486328125e-6f, 2.0f)); }

// Byte offset of the entry, 4 * (n + BETWEEN * (m - n)). The multipliers are multiples of 4, so 2^30 drops out.
TS_FN ts_u32 place_offset(float a) {
  return ceiling_bits(a) * (4u * BETWEEN) - floor_bits(a) * (4u * BETWEEN - 4u);
}

// The definitions, a and distances in units of 1/16. `record` of 4 bits: bit 3 is set where the code lies on the other
// side of zero from z.
constexpr int codeword(int k) { return k < 4 ? 8 * k : (k == 4 ? 32 : (k == 5 ? 48 : (k == 6 ? 64 : 96))); }
constexpr int boundary(int k) { return (codeword(k) + codeword(k + 1)) / 2; }
constexpr int distance(int p, int q) { return p > q ? p - q : q - p; }

// Lower end of the bracket of a: the largest k <= 6 with v_k <= a.
constexpr int bracket_of(int a) {
  int k = 0;
  while (k < 6 && codeword(k + 1) <= a) k++;
  return k;
}

// Nearest codeword, ties to the even index.
constexpr int nearest_of(int a) {
  int k = bracket_of(a);
  int below = a - codeword(k), above = codeword(k + 1) - a;
  return above < below || (above == below && k % 2 == 1) ? k + 1 : k;
}

// Distance from a to the values that round to codeword k.
constexpr int cell_distance(int k, int a) {
  int low = k > 0 ? boundary(k - 1) : 0;
  return a < low ? low - a : (k < 7 && a > boundary(k) ? a - boundary(k) : 0);
}

// Index of the reconstructed codeword among those with the recorded low bits: nearest by distance, then by distance of
// the decision cell (rule cell: the other way round); if both tie, the nearest codeword of all.
constexpr int reconstruct(int a, int record, int bits, int rule) {
  int lower = bracket_of(a), period = 1 << bits;
  if (rule == BRACKET) {
    if (lower % period == record) return lower;
    if ((lower + 1) % period == record) return lower + 1;
  }
  int best = -1, best_key = 0;
  bool tied = false;
  for (int k = record; k < 8; k += period) {
    int near = distance(codeword(k), a), cell = cell_distance(k, a);
    int key = rule == CELL ? cell * 1024 + near : near * 1024 + cell;
    if (best < 0 || key < best_key) {
      best = k, best_key = key, tied = false;
    } else if (key == best_key) {
      tied = true;
    }
  }
  return tied ? nearest_of(a) : best;
}

// Index of the bracket end nearest to the reconstructed codeword.
constexpr int guided_index(int a, int record, int bits, int rule) {
  int lower = bracket_of(a);
  int k = bits == 4 ? (record < 8 ? record : 0) : reconstruct(a, record, bits, rule);
  return k <= lower ? lower : lower + 1;
}

// Outcomes by record * STRIDE + entry, and after the last record those of rounding to nearest. a = 0, met by x = 0 alone,
// gives 0 whatever the record.
template <int BITS, int RULE>
struct Table {
  static const int RECORDS = 1 << BITS;
  float magnitude[(RECORDS + 1) * STRIDE];
  constexpr Table() : magnitude() {
    for (int record = 0; record <= RECORDS; record++)
      for (int place = 1; place < PLACES; place++) {
        int k = record < RECORDS ? guided_index(place, record, BITS, RULE) : nearest_of(place);
        magnitude[record * STRIDE + place / 2 + place % 2 * BETWEEN] = (float)codeword(k) * 0.0625f;
      }
  }
};

// Where the short form is exact: s a normal positive number, and small enough that no bfloat16 or float16 x but 0 vanishes
// in x * inv (2^-133 / 2^16 is above 2^-150).
TS_FN bool ordinary(float s) { return bits_of(s) - 0x00800000u < 0x47800000u - 0x00800000u; }

// z and a under an ordinary scale; z + 0 turns -0 into +0, so that x = -0 gives +0.
TS_FN float normalized(float x, float inv) { return multiply_add(x, inv, 0.0f); }
TS_FN float capped(float z) { return smaller(magnitude(z), 6.0f); }

// y from the outcome v.
TS_FN float scaled(float v, float s, float z) { return with_sign_of(multiply(v, s), z); }

// y for any x and s, in the oracle's order: the long form. `record` as the table takes it, see `record_for`. bits 0 is
// rounding to nearest and reads no table.
TS_FN float round_any(float x, float s, ts_u32 record, int bits, const float* table) {
  if (!finite(x) || !finite(s)) return nan_value();
  if (is_zero(s) || is_zero(x)) return 0.0f;
  float z = multiply(x, reciprocal(s));
  float v = bits == 0 ? nearest_magnitude(magnitude(z)) : 0.0f;
  if (bits != 0) {
    ts_u32 entry = place_offset(capped(z)) / 4;
    // A product that underflows to 0 is still above 0.
    v = table[record * STRIDE + (entry ? entry : BETWEEN)];
  }
  return multiply(with_sign_of(v, z), s);
}

// A recorded whole code as the table takes it: bit 3 tells whether its sign differs from that of z.
TS_FN ts_u32 record_for(ts_u32 code, float z, int bits) { return bits == 4 ? code ^ ((bits_of(z) >> 31) << 3) : code; }

// ---- quantizing -----------------------------------------------------------------------------------------------------

// Encode scale of a tensor or row with this maximum, and of a given decode scale.
TS_FN float encode_scale(float amax) { return is_zero(amax) ? 1.0f : smaller(divide(FULL_RANGE, amax), FLT_MAX_); }
TS_FN float encode_scale_of(float decode) { return smaller(reciprocal(decode), FLT_MAX_); }

// What blocks need of an encode scale, computed once for many of them.
struct Encoding {
  float sixth, inverse;
};
TS_FN Encoding encoding_of(float encode) {
  Encoding e;
  e.sixth = multiply(encode, SIXTH);
  e.inverse = reciprocal(encode);
  return e;
}

// Multiplier that takes x to code space; 0 where the scale is 0.
TS_FN float multiplier_of(float s) {
  if (ordinary(s)) return reciprocal_ordinary(s);
  return is_zero(s) ? 0.0f : smaller(reciprocal(s), FLT_MAX_);
}

// Scale byte of a block with maximum amax, and the multiplier.
TS_FN ts_u32 block_scale_e4m3(float amax, const Encoding& e, float* multiplier) {
  ts_u32 byte = encode_e4m3(multiply(amax, e.sixth));
  *multiplier = multiplier_of(multiply(decode_e4m3(byte), e.inverse));
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
  return (bits_of(nearest_magic(magnitude(z))) & 7u) | ((bits_of(z) >> 31) << 3);
}

}  // namespace e2m1
