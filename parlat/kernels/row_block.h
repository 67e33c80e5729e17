#pragma once

#include <cstdint>

#include "parlat/base/range.h"

namespace parlat {

// y[i][n] = x[i] . w[n], fp32 sums. Strides in elements.
struct RowBlock {
  const float* x;  // [m, depth]
  int64_t x_stride, m, depth;
  const void* w;  // [N, depth], bf16 or fp32
  int64_t w_stride;
  bool bf16;
  float* y;  // [m, N]
  int64_t y_stride;
};

// Columns `rows` of y: the rows of w to stream. Compiled for several instruction sets.
void multiply_rows(const RowBlock& block, Range rows);

}  // namespace parlat
