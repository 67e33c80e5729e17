#include "parlat/kernels/query_gradient.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "parlat/tensor/fill.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {
namespace {

constexpr int64_t kTokens = 5, kHeads = 3, kColumns = 70, kParts = 9;

Tensor queries(at::ScalarType dtype) { return at::zeros({1, kTokens, kHeads, kColumns}, dtype); }

// Part `i` of one head: rows of very different sizes, one of zeros, and a column that is much larger than the others.
Tensor part(int64_t i) {
  Tensor sizes = at::tensor({1.0f, 1e-20f, 0.0f, 1e4f, 1e-37f}).unsqueeze(1).repeat({1, kColumns});
  sizes.select(1, 40).mul_(1000);
  return seeded_normal({kTokens, kColumns}, 1, 7, fmt::format("part {}", i), at::kFloat) * sizes;
}

void add(const QueryGradient& gradient, int64_t h, const Tensor& x) {
  const Tensor sums = gradient.open(0, h);
  sums.add_(x);
  gradient.close(0, h, sums);
}

// The largest of the 32 columns that each column is among.
Tensor largest_around(const Tensor& x_Sd) {
  const Tensor padded = at::constant_pad_nd(x_Sd.abs(), {0, 26});
  return padded.view({kTokens, 3, 32}).amax(2, true).expand({kTokens, 3, 32}).reshape({kTokens, 96}).narrow(1, 0, 70);
}

TEST(QueryGradientInUnits, LosesHalfAUnitAPart) {
  QueryGradient gradient = QueryGradient::zeros(queries(at::kBFloat16), kParts);
  Tensor exact = at::zeros({kTokens, kColumns}, at::kDouble), bound = at::zeros({kTokens, kColumns}, at::kDouble);
  for (int64_t i = 0; i < kParts; ++i) {
    add(gradient, 1, part(i));
    exact += part(i).to(at::kDouble);
    // Half a unit and the rounding of an fp32 sum, of the largest, itself off by what was lost; a unit is normal.
    bound += ((largest_around(exact) + largest_around(bound)) * (std::ldexp(1, -15) + std::ldexp(1, -23)))
                 .clamp_min(std::ldexp(1, -127));
  }
  const Tensor got = std::move(gradient).finish(at::kFloat)[0].select(1, 1).to(at::kDouble);
  EXPECT_TRUE(((got - exact).abs() <= bound).all().item<bool>()) << ((got - exact).abs() / bound).max().item<double>();
  EXPECT_TRUE(got[2].eq(0).all().item<bool>());
  EXPECT_GT((got[0] - exact[0]).abs().max().item<double>(), 0) << "nothing was rounded";
}

// As 15 bits hold it the largest is the next power of two: it must not wrap around.
TEST(QueryGradientInUnits, HoldsWhatRoundsUpToAPowerOfTwo) {
  const float almost_two = std::nextafter(2.0f, 0.0f), largest = std::numeric_limits<float>::max();
  QueryGradient gradient = QueryGradient::zeros(queries(at::kBFloat16), 2);
  Tensor x = at::zeros({kTokens, kColumns});
  x.select(1, 0).fill_(almost_two);
  x.select(1, 33).fill_(-almost_two);
  x.select(1, 69).fill_(largest);
  add(gradient, 0, x);
  const Tensor got = std::move(gradient).finish(at::kFloat)[0].select(1, 0);
  EXPECT_TRUE(got.select(1, 0).eq(2).all().item<bool>());
  EXPECT_TRUE(got.select(1, 33).eq(-2).all().item<bool>());
  EXPECT_TRUE(got.select(1, 69).isposinf().all().item<bool>());  // as in bf16
}

TEST(QueryGradientInUnits, TakesTwoBytesAnElementAndOneForThirtyTwo) {
  const Tensor q = queries(at::kBFloat16);
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const QueryGradient gradient = QueryGradient::zeros(q, 2);
  EXPECT_EQ(meter.current_bytes(), kTokens * kHeads * (2 * kColumns + 3));
}

TEST(QueryGradientInUnits, MakesTheColumnsAroundANumberThatIsNoneNaN) {
  for (const float poison : {NAN, INFINITY, -INFINITY}) {
    QueryGradient gradient = QueryGradient::zeros(queries(at::kBFloat16), 2);
    Tensor x = part(0);
    x[3][69] = poison;
    add(gradient, 2, x);
    add(gradient, 2, part(1));
    const Tensor got = std::move(gradient).finish(at::kBFloat16)[0].select(1, 2);
    EXPECT_TRUE(got[3].narrow(0, 64, 6).isnan().all().item<bool>()) << poison;
    EXPECT_EQ(got.isnan().sum().item<int64_t>(), 6) << poison;
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
