#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "parlat/tensor/shape.h"

namespace parlat {

// A tolerance derived from the arithmetic, not tuned: a result that is a chain of `depth` sums of up to `terms`
// products in a dtype of unit roundoff u has error at most about depth * (sqrt(terms) + 2) * u * scale with rounding
// errors of random sign (Higham and Mary 2019), where scale is the result's own size. kSafety covers the tail.
struct Tolerance {
  double relative_to_norm;  // of max |want|
  static constexpr double kSafety = 8.0;
  static Tolerance rounding(at::ScalarType dtype, int64_t terms, int64_t depth);
};

struct Comparison {
  bool close = false;
  double max_error = 0;  // max |got - want|
  double max_want = 0;   // max |want|
  double allowed = 0;    // the bound on max_error
  std::string worst;     // "[1, 7, 3]: got 1.25, want 1.5"
  std::string text() const;
};

// Shapes must be equal (InternalError). NaN in either fails unless both are NaN at the same place.
Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance);

}  // namespace parlat
