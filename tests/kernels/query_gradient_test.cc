#include "parlat/kernels/query_gradient.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "parlat/tensor/fill.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {
namespace {

constexpr int64_t kTokens = 5, kHeads = 3, kColumns = 70, kParts = 9;

Tensor queries(at::ScalarType dtype) { return at::zeros({1, kTokens, kHeads, kColumns}, dtype); }

// Part `i` of one head: rows of very different sizes, one of zeros.
Tensor part(int64_t i) {
  const Tensor sizes = at::tensor({1.0f, 1e-20f, 0.0f, 1e4f, 1e-37f}).unsqueeze(1);
  return seeded_normal({kTokens, kColumns}, 1, 7, fmt::format("part {}", i), at::kFloat) * sizes;
}

void add(const QueryGradient& gradient, int64_t h, const Tensor& x) {
  const Tensor sums = gradient.open(0, h);
  sums.add_(x);
  gradient.close(0, h, sums);
}

TEST(QueryGradientInUnits, LosesHalfAUnitAPart) {
  QueryGradient gradient = QueryGradient::zeros(queries(at::kBFloat16), kParts);
  Tensor exact = at::zeros({kTokens, kColumns}, at::kDouble), bound = at::zeros({kTokens, 1}, at::kDouble);
  for (int64_t i = 0; i < kParts; ++i) {
    add(gradient, 1, part(i));
    exact += part(i).to(at::kDouble);
    // Half a unit of the largest element, which itself is off by what was lost before; a unit is a normal number.
    bound += ((exact.abs().amax(1, true) + bound) / 65534 * (1 + 1e-6)).clamp_min(std::ldexp(1.0, -127));
  }
  const Tensor got = std::move(gradient).finish(at::kFloat)[0].select(1, 1).to(at::kDouble);
  EXPECT_TRUE(((got - exact).abs() <= bound).all().item<bool>()) << ((got - exact).abs() / bound).max().item<double>();
  EXPECT_TRUE(got[2].eq(0).all().item<bool>());
  EXPECT_GT((got[0] - exact[0]).abs().max().item<double>(), 0) << "nothing was rounded";
}

TEST(QueryGradientInUnits, TakesTwoBytesAnElementAndAUnitARow) {
  const Tensor q = queries(at::kBFloat16);
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const QueryGradient gradient = QueryGradient::zeros(q, 2);
  EXPECT_EQ(meter.current_bytes(), kTokens * kHeads * (2 * kColumns + 4));
}

TEST(QueryGradientInUnits, MakesTheRowOfANumberThatIsNoneNaN) {
  for (const float poison : {NAN, INFINITY, -INFINITY}) {
    QueryGradient gradient = QueryGradient::zeros(queries(at::kBFloat16), 2);
    Tensor x = part(0);
    x[3][69] = poison;
    add(gradient, 2, x);
    add(gradient, 2, part(1));
    const Tensor got = std::move(gradient).finish(at::kBFloat16)[0].select(1, 2);
    EXPECT_TRUE(got[3].isnan().all().item<bool>()) << poison;
    EXPECT_FALSE(got[0].isnan().any().item<bool>() || got[4].isnan().any().item<bool>()) << poison;
  }
}

TEST(QueryGradientAsTensor, IsExactInFp32AndRoundsOnePartOnce) {
  QueryGradient wide = QueryGradient::zeros(queries(at::kFloat), kParts);
  for (int64_t i = 0; i < 2; ++i) add(wide, 0, part(i));
  EXPECT_TRUE(std::move(wide).finish(at::kFloat)[0].select(1, 0).equal(part(0) + part(1)));

  QueryGradient once = QueryGradient::zeros(queries(at::kBFloat16), 1);
  add(once, 0, part(0));
  EXPECT_TRUE(std::move(once).finish(at::kBFloat16)[0].select(1, 0).equal(part(0).to(at::kBFloat16)));
}

}  // namespace
}  // namespace parlat
