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
  // element all the same, and one for 32: integers of 16 bits in units of a power of two, of which the largest of 32
  // columns of a token and head is 2^14 to 2^15. A part rounds by half a unit, so n parts lose n 2^-15 of that element,
  // of which bf16 loses 2^-9 in the end. A NaN or an infinity makes those 32 columns NaN.
  static QueryGradient zeros(const Tensor& q_BSHd, int n_parts);

  // The sums of one head in one sequence [S, d] in the dtype of the arithmetic; add to them, then close.
  Tensor open(int64_t b, int64_t h) const;
  void close(int64_t b, int64_t h, const Tensor& sums_Sd) const;

  // The sums in dtype; what held them is free.
  Tensor finish(at::ScalarType dtype) &&;

 private:
  Tensor sums_BSHd_;
  Tensor exponents_BSHb_;  // int8, of the unit of each block of columns; defined where sums are integers
};

}  // namespace parlat
