// Matrix products of wgmma and tcgen05.
#pragma once
#include "floats.hpp"

namespace cupyfa::emulator {
namespace {

/// Accumulators 4j + i of every warp are columns 8j + 2 (lane % 4) + i % 2 of rows 16 w + lane / 4 + 8 (i / 2).
void wgmma(u32* const* const* rows, const float* a, const float* b, int n, int k, bool accumulate, bool half) {
  alignas(64) float left[2][4][64][lanes];  // [row half][warp][k][lane], k at most 64
  for (int h = 0; h < 2; ++h)
    for (int w = 0; w < 4; ++w)
      for (int i = 0; i < k; ++i)
        for (int l = 0; l < lanes; ++l) left[h][w][i][l] = a[64 * i + 16 * w + l / 4 + 8 * h];
  for (int j = 0; j < n / 8; ++j) {
    for (int parity = 0; parity < 2; ++parity) {
      alignas(64) float right[64][lanes];
      for (int i = 0; i < k; ++i)
        for (int l = 0; l < lanes; ++l) right[i][l] = b[static_cast<int64_t>(n) * i + 8 * j + 2 * (l % 4) + parity];
      for (int h = 0; h < 2; ++h) {
        for (int w = 0; w < 4; ++w) {
          u32* row = half ? rows[w][2 * j + h] : rows[w][4 * j + 2 * h + parity];
          alignas(64) float sum[lanes];
          for (int l = 0; l < lanes; ++l) {
            const float old = half ? float_of_f16(row[l] >> (16 * parity) & 0xffff) : float_of(row[l]);
            sum[l] = accumulate ? old : 0.0f;
          }
          for (int i = 0; i < k; ++i) {
            const float *x = left[h][w][i], *y = right[i];
#pragma GCC ivdep
            for (int l = 0; l < lanes; ++l) sum[l] += x[l] * y[l];
          }
          for (int l = 0; l < lanes; ++l) {
            if (half) {
              const u32 keep = row[l] & (parity ? 0x0000'ffffu : 0xffff'0000u);
              row[l] = keep | f16_of(sum[l]) << (16 * parity);
            } else {
              row[l] = bits_of(canonical(sum[l]));
            }
          }
        }
      }
    }
  }
}

template <int height>
void product(float* d, const float* a, int a_stride, const float* b, int n, int k, float scale) {
  for (int j = 0; j < n; ++j) {
    float* column = d + 128 * static_cast<int64_t>(j);
    alignas(64) float sum[height];
    for (int l = 0; l < height; ++l) sum[l] = scale == 0 ? 0.0f : column[l] * scale;
    for (int i = 0; i < k; ++i) {
      const float y = b[static_cast<int64_t>(n) * i + j];
      const float* x = a + static_cast<int64_t>(a_stride) * i;
#pragma GCC ivdep
      for (int l = 0; l < height; ++l) sum[l] += x[l] * y;
    }
    for (int l = 0; l < height; ++l) column[l] = canonical(sum[l]);
  }
}
void tcgen05_mma(float* d, const float* a, int a_stride, const float* b, int n, int k, int lane, int height,
                 float scale) {
  int done = 0;
  for (; height - done >= 64; done += 64) product<64>(d + lane + done, a + done, a_stride, b, n, k, scale);
  for (; height - done >= 16; done += 16) product<16>(d + lane + done, a + done, a_stride, b, n, k, scale);
}

}  // namespace
}  // namespace cupyfa::emulator
