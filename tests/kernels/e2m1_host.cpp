// The numeric core of the kernels compiled as plain C++, behind a C interface for ctypes.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "compare.cuh"

namespace {
template <int BITS, int RULE>
const uint32_t* outcomes() {
  static constexpr compare::Outcomes<BITS, RULE> built;
  return built.word;
}

float decode(uint32_t byte, int e8m0) { return e8m0 ? e2m1::decode_e8m0(byte) : e2m1::decode_e4m3(byte); }

template <int BITS, int RULE>
const float* table() {
  static constexpr e2m1::Table<BITS, RULE> built;
  return built.magnitude;
}

const float* table_of(int bits, int rule) {
  static const float* const tables[5][3] = {
      {nullptr, nullptr, nullptr},
      {table<1, 0>(), table<1, 1>(), table<1, 2>()},
      {table<2, 0>(), table<2, 1>(), table<2, 2>()},
      {table<3, 0>(), table<3, 1>(), table<3, 2>()},
      {table<4, 0>(), table<4, 0>(), table<4, 0>()},
  };
  return tables[bits][rule];
}

// The short form, as the kernels write it out.
float round_ordinary(float x, float s, float inv, uint32_t record, int bits, const float* t) {
  float z = e2m1::normalized(x, inv);
  if (bits == 0) return e2m1::scaled(e2m1::nearest_magnitude(e2m1::magnitude(z)), s, z);
  uint32_t entry = e2m1::record_for(record, z, bits) * e2m1::STRIDE + e2m1::place_offset(e2m1::capped(z)) / 4;
  return e2m1::scaled(t[entry], s, z);
}
}  // namespace

extern "C" {
// y[i] for one scale byte, tensor scale and record, over n values of x. kernel = 0: the long form throughout.
void round_values(const float* x, int64_t n, uint32_t byte, int e8m0, float tensor_scale, uint32_t record, int bits,
                  int rule, int kernel, float* y) {
  float s = e2m1::multiply(decode(byte, e8m0), tensor_scale);
  float inv = e2m1::reciprocal(s);
  const float* t = table_of(bits, rule);
  for (int64_t i = 0; i < n; i++) {
    bool brief = kernel && e2m1::ordinary(s) && e2m1::finite(x[i]);
    y[i] = brief ? round_ordinary(x[i], s, inv, record, bits, t)
                 : e2m1::round_any(x[i], s, e2m1::record_for(record, e2m1::multiply(x[i], inv), bits), bits, t);
  }
}

// Counts of n values under one scale and record, in the order of `discrepancy`'s sums; returns how often the table offset
// that the kernel computes is not the one of the value's place.
int64_t compare_values(const float* x, int64_t n, float s, uint32_t record, int bits, int rule, int64_t* counts) {
  const uint32_t* const tables[4][3] = {{outcomes<1, 0>(), outcomes<1, 1>(), outcomes<1, 2>()},
                                        {outcomes<2, 0>(), outcomes<2, 1>(), outcomes<2, 2>()},
                                        {outcomes<3, 0>(), outcomes<3, 1>(), outcomes<3, 2>()},
                                        {outcomes<4, 0>(), outcomes<4, 0>(), outcomes<4, 0>()}};
  const int words = bits == 4 ? 2 : 1, size = 4 * words;
  const int places = compare::places_of(bits, rule);
  const float inv = e2m1::reciprocal(s);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!e2m1::finite(x[i])) continue;
    uint32_t r = bits == 4 ? record ^ (e2m1::bits_of(x[i]) >> 31 << 3) : record;
    // Among records of 16 elements whose other bits are the complement.
    int place = compare::place_of(x[i], inv), element = (int)(i % 16);
    uint32_t planes[3], nibbles = 15u << (element % 8 * 4);
    for (int j = 0; j < 3; j++) planes[j] = (r >> j & 1u) ? 1u << element : 0xFFFFu & ~(1u << element);
    if (bits == 4) planes[0] = planes[1] = (~r & 15u) * 0x11111111u ^ nibbles;
    compare::Records records = compare::arrange(planes, bits);
    uint32_t upper = compare::upper_of(records, element, bits, compare::upper_bits(size));
    float t = e2m1::multiply_saturated(e2m1::magnitude(x[i]), inv * 0.125f);
    int entry = (int)compare::offset_of(t, upper, compare::lower_bits(size, places), size, places) / size;
    entry -= compare::displaced(bits, (int)r, element % compare::copies(bits)) * (places + 1);
    const uint32_t* part = tables[bits - 1][rule] + r * e2m1::PLACES * (uint32_t)words;
    // The entry may stand for a wider range than the place; what counts is the outcome.
    bool inside = entry >= 0 && entry < 2 * (places + 1);
    wrong += !inside || memcmp(part + compare::place_at(entry, places) * words, part + place * words, (size_t)size) != 0;
    const uint32_t* word = tables[bits - 1][rule] + (r * e2m1::PLACES + (uint32_t)place) * (uint32_t)words;
    uint32_t raised = word[0] >> compare::RAISED & 1, lowered = word[0] >> compare::LOWERED & 1;
    counts[0]++;
    counts[1] += word[0] >> compare::MISMATCHED & 1;
    counts[2] += bits == 4 ? word[0] >> compare::ADJACENT & 1 : raised + lowered;
    counts[3] += raised;
    counts[4] += lowered;
    counts[5] += word[0] >> compare::LEFT & 1;
    counts[6] += bits == 4 ? word[1] >> compare::FLIPPED : 0;
  }
  return wrong;
}

void decode_bytes(int e8m0, float* out) {
  for (uint32_t byte = 0; byte < 256; byte++) out[byte] = decode(byte, e8m0);
}

void encode_values(const float* v, int64_t n, int e8m0, uint8_t* out) {
  for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)(e8m0 ? e2m1::encode_e8m0(v[i]) : e2m1::encode_e4m3(v[i]));
}

// One block of x: codes, scale byte. decode_scale <= 0: from `amax`, the maximum of the tensor.
void quantize_block(const float* x, int n, int e8m0, float amax, float decode_scale, uint8_t* codes, uint8_t* scale) {
  float block_amax = 0.0f, multiplier;
  for (int i = 0; i < n; i++) block_amax = std::fmax(block_amax, std::fabs(x[i]));
  float encode = decode_scale > 0.0f ? e2m1::encode_scale_of(decode_scale) : e2m1::encode_scale(amax);
  *scale = (uint8_t)(e8m0 ? e2m1::block_scale_e8m0(block_amax, &multiplier)
                          : e2m1::block_scale_e4m3(block_amax, e2m1::encoding_of(encode), &multiplier));
  for (int i = 0; i < n; i++) codes[i] = (uint8_t)e2m1::quantize_code(x[i], multiplier);
}
}
