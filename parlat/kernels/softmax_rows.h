#pragma once

#include <cstdint>
#include <limits>

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

// Of the scores of a row that came so far: their maximum, the sum of exp(score - max), and the same sum of what values
// are multiplied by, which may have been rounded.
template <typename T>
struct RunningSoftmax {
  T max = -std::numeric_limits<T>::infinity(), sum = 0, weight = 0;
};

// One block of a row's scores joins those before it: row[inside] becomes exp(score - max) with the new running maximum,
// the rest of row[0, n) 0; so_far follows. Returns exp(old max - new max), by which everything summed before must
// shrink. NaN and +inf make all of `inside` NaN, and the sums.
// bf16 (fp32 only): also gets the row, which then is rounded to bf16 itself.
float join_softmax_row(float* row, int64_t n, Range inside, RunningSoftmax<float>& so_far, uint16_t* bf16 = nullptr);
double join_softmax_row(double* row, int64_t n, Range inside, RunningSoftmax<double>& so_far, uint16_t* bf16 = nullptr);

// Backward of a block of scores whose softmax is known by its lse, the logarithm of the sum of exp(score) over the
// whole row: row[inside] becomes p = exp(score - lse), the rest 0, and grad = p (grad - along) scale, along being the
// sum of p grad over the whole row. whole: `inside` is the whole row; then that sum is taken here, as the forward
// pass's rounding of what along was computed from doesn't cancel where few keys are seen. Exactly 0 where p is 1.
// row_bf16, grad_bf16 (fp32 only): also get both, rounded to bf16 in the end.
void regain_softmax_row(float* row, float* grad, int64_t n, Range inside, bool whole, float lse, float along,
                        float scale, uint16_t* row_bf16 = nullptr, uint16_t* grad_bf16 = nullptr);
void regain_softmax_row(double* row, double* grad, int64_t n, Range inside, bool whole, double lse, double along,
                        double scale, uint16_t* row_bf16 = nullptr, uint16_t* grad_bf16 = nullptr);

}  // namespace parlat
