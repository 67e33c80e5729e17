#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "parlat/tensor/shape.h"

namespace parlat {

// A tolerance derived from the arithmetic, not tuned. A sum of up to `terms` products in a dtype of unit roundoff u has
// an error of about (sqrt(terms) + 2) u of its own size with rounding errors of random sign (Higham and Mary 2019).
// 16-bit products are summed in fp32 and only each result is rounded: u. The errors of `depth` such stages that follow
// one another are independent, so their squares add: sqrt(depth) times one stage's. That is the standard deviation of
// an element's error at most (a rounding is uniform below u: u / sqrt(3)), and kSafety covers what differs from it:
// rows that few tokens contribute to, sums that cancel in part, the largest of many.
struct Tolerance {
  double relative_to_norm;  // of max |want| for every element, of a row's RMS for the RMS of its errors
  static constexpr double kSafety = 4.0;
  static Tolerance rounding(at::ScalarType dtype, int64_t terms, int64_t depth);
};

// What errors are measured against.
struct Scale {
  double max = 0;  // max |want|
  double rms = 0;
};
Scale scale_of(const Tensor& want);

// Every element within the tolerance of the largest; and, since a row is hidden among larger ones where only the
// largest counts, the RMS error of every row (the last dimension; together with those before it until a row has kRow
// elements) within the tolerance of the row's own RMS, or of kSmallRow of the whole tensor's where that is larger: a
// row that is missing, or scaled, is off by its own size.
struct Comparison {
  bool close = false;
  double max_error = 0;  // max |got - want|
  double allowed = 0;    // the bound on max_error
  double row_error = 0;  // the largest RMS error of a row, relative to the row's
  double relative = 0;   // the larger of row_error and max_error relative to the scale's max: what the tolerance bounds
  std::string worst;     // "[1, 7, 3]: got 1.25, want 1.5"
  std::string text() const;

  static constexpr int64_t kRow = 16;
  static constexpr double kSmallRow = 0.1;
};

// Shapes must be equal (InternalError). NaN in either fails unless both are NaN at the same place.
Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance);
// The same of a part of a tensor that has this scale.
Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance, const Scale& whole);

}  // namespace parlat
