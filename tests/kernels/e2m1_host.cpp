// The numeric core of the kernels compiled as plain C++, behind a C interface for ctypes.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "e2m1.cuh"

namespace {
float decode(uint32_t byte, int e8m0) { return e8m0 ? e2m1::decode_e8m0(byte) : e2m1::decode_e4m3(byte); }

// What a kernel does with one element: the short form where the block is ordinary, else the long one.
float as_kernel(float x, float s, float inv, uint32_t record, int bits, int band) {
  if (e2m1::ordinary(s) && e2m1::finite(x)) return e2m1::round_ordinary(x, s, inv, record, bits, band);
  return e2m1::round_any(x, s, record, bits, band);
}
}  // namespace

extern "C" {
// y[i] for one scale byte, tensor scale and record, over n values of x. kernel = 0: the long form throughout.
void round_values(const float* x, int64_t n, uint32_t byte, int e8m0, float tensor_scale, uint32_t record, int bits,
                  int cell, int kernel, float* y) {
  float s = e2m1::total_scale(decode(byte, e8m0), tensor_scale);
  float inv = e2m1::reciprocal(s);
  int band = cell ? e2m1::BAND_CELL : e2m1::BAND_PAPER;
  for (int64_t i = 0; i < n; i++)
    y[i] = kernel ? as_kernel(x[i], s, inv, record, bits, band) : e2m1::round_any(x[i], s, record, bits, band);
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
                          : e2m1::block_scale_e4m3(block_amax, encode, &multiplier));
  for (int i = 0; i < n; i++) codes[i] = (uint8_t)e2m1::quantize_code(x[i], multiplier);
}
}
