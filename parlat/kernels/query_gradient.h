#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// Where the gradient of queries [B, S, H, d] is summed, a head of a sequence at a time.
class QueryGradient {
 public:
  // Adds to sums of any dtype, which are rounded once a call where that isn't the arithmetic's.
  QueryGradient(Tensor sums_BSHd) : sums_BSHd_(std::move(sums_BSHd)) {}  // NOLINT: a tensor is one kind

  // Zeros for queries q, to be added to n_parts times (n_parts sets of keys). Several parts in bf16 take two bytes an
  // element all the same: integers of 16 bits in a unit of each token and head, the largest element being 32,767 of
  // them. A part rounds by half a unit, 2^-16 of that element, so that in a sum of n parts n 2^-7 of what bf16 rounds
  // the largest off in the end is lost. A NaN or an infinity makes its token's whole row NaN.
  static QueryGradient zeros(const Tensor& q_BSHd, int n_parts);

  // The sums of one head in one sequence [S, d] in the dtype of the arithmetic; add to them, then close.
  Tensor open(int64_t b, int64_t h) const;
  void close(int64_t b, int64_t h, const Tensor& sums_Sd) const;

  // The sums in dtype; what held them is free.
  Tensor finish(at::ScalarType dtype) &&;

 private:
  Tensor sums_BSHd_;
  Tensor unit_BSH_;  // fp32; defined where sums are integers
};

}  // namespace parlat
