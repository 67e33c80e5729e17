#include "parlat/mla/merge.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"

namespace parlat {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Merge, PartsOfAnyKindAddUpToTheWhole) {
  const Tensor scores = seeded_normal({3, 4, 20}, 3.0, 1, "scores", at::kDouble);
  const Tensor values = seeded_normal({20, 5}, 1.0, 1, "values", at::kDouble);
  const auto attend = [&](int64_t begin, int64_t end) -> PartialOut {
    if (begin == end) return {at::zeros({3, 4, 5}, at::kDouble), at::full({3, 4}, -kInfinity, at::kDouble)};
    const Tensor part = scores.narrow(2, begin, end - begin);
    return {at::matmul(part.softmax(-1), values.narrow(0, begin, end - begin)), part.logsumexp(-1)};
  };
  const PartialOut whole = attend(0, 20);
  const PartialOut merged = merge({attend(0, 0), attend(0, 7), attend(7, 8), attend(8, 8), attend(8, 20)});
  EXPECT_CLOSE(merged.out, whole.out, Tolerance::rounding(at::kDouble, 20, 3));
  EXPECT_CLOSE(merged.lse, whole.lse, Tolerance::rounding(at::kDouble, 20, 3));
}

TEST(Merge, NothingStaysNothing) {
  const PartialOut empty{at::zeros({2, 3}), at::full({2}, -kInfinity)};
  const PartialOut merged = merge({empty, empty});
  EXPECT_TRUE(merged.out.equal(empty.out));
  EXPECT_TRUE(merged.lse.equal(empty.lse));
}

// Two parts of weights 1 and 3, outs 2 and 10: 8. With the second lse taken for one in base 2 it would be 7.233.
TEST(Merge, LseIsInBaseE) {
  const PartialOut first{at::full({1, 1}, 2.0), at::zeros({1})};
  const PartialOut second{at::full({1, 1}, 10.0), at::full({1}, std::log(3.0))};
  EXPECT_NEAR(merge({first, second}).out.item<double>(), 8.0, 1e-6);
}

}  // namespace
}  // namespace parlat
