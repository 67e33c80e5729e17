#pragma once

#include "parlat/base/range.h"

namespace parlat {

// Softmax of one row of scores, compiled for several instruction sets and chosen at run time. Sums run in a fixed order
// that no instruction set changes, without fused multiply-adds: the same bits everywhere.

// row[inside] becomes its softmax, the rest of row[0, n) 0. NaN, +inf, or nothing but -inf make all of `inside` NaN.
// fp32: exp within 2e-7 of the exact value down to the smallest normal number, 0 below.
void softmax_row(float* row, int64_t n, Range inside);
void softmax_row(double* row, int64_t n, Range inside);

// Gradient of scale * scores in place: grad = p (grad - sum(p grad)) scale.
void softmax_row_backward(const float* p, float* grad, int64_t n, float scale);
void softmax_row_backward(const double* p, double* grad, int64_t n, double scale);

}  // namespace parlat
