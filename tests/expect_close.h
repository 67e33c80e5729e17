#pragma once

#include <gtest/gtest.h>

#include "parlat/tensor/compare.h"

namespace parlat {

// EXPECT_CLOSE(got, want, Tolerance::rounding(at::kFloat, terms, depth)): the worst element, both values and the bound.
inline ::testing::AssertionResult is_close(const char* got_text, const char*, const char*, const Tensor& got,
                                           const Tensor& want, const Tolerance& tolerance) {
  if (got.sizes() != want.sizes()) {
    return ::testing::AssertionFailure() << got_text << ": shape " << shape_text(got.sizes()) << " against "
                                         << shape_text(want.sizes());
  }
  const Comparison result = compare(got, want, tolerance);
  if (result.close) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got_text << ": " << result.text();
}

#define EXPECT_CLOSE(got, want, tolerance) EXPECT_PRED_FORMAT3(::parlat::is_close, got, want, tolerance)

}  // namespace parlat
