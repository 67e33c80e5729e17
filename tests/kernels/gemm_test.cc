// Products of all dtypes, strides and paths against fp64.
#include "parlat/kernels/gemm.h"

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/base/error.h"
#include "parlat/kernels/bf16_product.h"
#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/central_differences.h"
#include "tests/kernels/forced_gemm.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 3;

Tensor random(at::IntArrayRef shape, const char* name, at::ScalarType dtype = at::kFloat) {
  return seeded_normal(shape, 1, kSeed, name, dtype);
}

Tensor exact(const Tensor& a, const Tensor& b) { return at::matmul(a.to(at::kDouble), b.to(at::kDouble)); }

class Gemm : public OnEveryGemmPath {
 protected:
  Tolerance rounding(int64_t terms) const { return Tolerance::rounding(dtype(), terms, 1); }
};

// Rows, depth and columns beyond one panel, one after the other.
TEST_P(Gemm, AnyShape) {
  for (const auto& [m, k, n] :
       {std::tuple<int64_t, int64_t, int64_t>{5, 7, 3}, {1030, 3, 5}, {3, 2100, 5}, {5, 3, 1030}}) {
    const Tensor a = random({m, k}, "a", dtype()), b = random({k, n}, "b", dtype());
    const Tensor c = at::full({m, n}, NAN, a.options());
    gemm(a, b, c);
    EXPECT_CLOSE(c, exact(a, b), rounding(k)) << m << " x " << k << " x " << n;
  }
}

TEST_P(Gemm, AnyStrides) {
  const Tensor a = random({7, 9, 2}, "a", dtype()).select(2, 1), b = random({5, 9}, "b", dtype()).t();
  const Tensor whole = at::zeros({7, 11}, a.options()), c = whole.narrow(1, 3, 5);
  gemm(a, b, c);
  EXPECT_CLOSE(c, exact(a, b), rounding(9));
  gemm(a.t().contiguous().t(), b.contiguous(), c);
  EXPECT_CLOSE(c, exact(a, b), rounding(9));
  EXPECT_EQ(whole.narrow(1, 0, 3).abs().sum().item<double>() + whole.narrow(1, 8, 3).abs().sum().item<double>(), 0);
}

TEST_P(Gemm, AddsToWhatIsThere) {
  const Tensor a = random({4, 1500}, "a", dtype()), b = random({1500, 6}, "b", dtype()),
               c = random({4, 6}, "c", dtype());
  const Tensor want = c.to(at::kDouble) + exact(a, b);
  gemm(a, b, c, /*accumulate=*/true);
  EXPECT_CLOSE(c, want, rounding(1500));
}

TEST_P(Gemm, WideResultOfNarrowOperands) {
  const Tensor a = random({4, 1500}, "a", dtype()), b = random({1500, 6}, "b", dtype());
  const at::ScalarType compute = compute_dtype(dtype());
  const Tensor c = at::ones({4, 6}, compute);
  gemm(a, b, c, /*accumulate=*/true);
  EXPECT_CLOSE(c, 1 + exact(a, b), Tolerance::rounding(compute, 1500, 1));
}

TEST_P(Gemm, NothingToSum) {
  const Tensor c = at::ones({2, 3}, dtype());
  gemm(at::empty({2, 0}, dtype()), at::empty({0, 3}, dtype()), c, /*accumulate=*/true);
  EXPECT_EQ(c.sum().item<double>(), 6);
  gemm(at::empty({2, 0}, dtype()), at::empty({0, 3}, dtype()), c);
  EXPECT_EQ(c.abs().sum().item<double>(), 0);
}

TEST_P(Gemm, LinearAndItsGradients) {
  const Tensor x = random({2, 5, 12}, "x", dtype()).narrow(2, 1, 9).requires_grad_();  // rows 12 apart
  const Tensor w = random({4, 9}, "w", dtype()).requires_grad_(), grad = random({2, 4, 5}, "grad", dtype()).mT();
  const Tensor y = parlat::linear(x, w);
  const auto grads = torch::autograd::grad({y}, {x, w}, {grad});
  EXPECT_CLOSE(y, exact(x, w.t()), rounding(9));
  EXPECT_CLOSE(grads[0], exact(grad, w), rounding(4));
  EXPECT_CLOSE(grads[1], exact(grad.flatten(0, 1).t(), x.flatten(0, 1)), rounding(10));
  EXPECT_EQ(grads[1].scalar_type(), dtype());
}

TEST_P(Gemm, LinearOfNoRows) {
  const Tensor x = at::empty({2, 0, 9}, dtype()).requires_grad_(), w = random({4, 9}, "w", dtype()).requires_grad_();
  const Tensor y = parlat::linear(x, w);
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 0, 4}));
  const auto grads = torch::autograd::grad({y}, {x, w}, {at::empty_like(y)});
  EXPECT_EQ(grads[0].sizes(), x.sizes());
  EXPECT_EQ(grads[1].abs().sum().item<double>(), 0);
}

TEST_P(Gemm, RepeatsItsBits) {
  const Tensor x = random({40, 1100}, "x", dtype()), w = random({30, 1100}, "w", dtype());
  EXPECT_TRUE(parlat::linear(x, w).equal(parlat::linear(x, w)));
}

TEST_P(Gemm, NanReachesItsRowOnly) {
  const Tensor x = random({3, 8}, "x", dtype()), w = random({4, 8}, "w", dtype());
  x[1][2] = NAN;
  const Tensor y = parlat::linear(x, w);
  EXPECT_TRUE(y[1].isnan().all().item<bool>());
  EXPECT_FALSE(y[0].isnan().any().item<bool>() || y[2].isnan().any().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Paths, Gemm, kGemmPaths, gemm_path_name);

// What else the kernels would fall back to is right, too, but slow: this says that oneDNN's product is found.
TEST(Bf16Product, IsThereWhereTheMachineHasIt) {
  if (!native_bf16_gemm()) GTEST_SKIP() << "no native bf16";
  const Tensor a = seeded_normal({5, 7}, 1.0, 1, "a").to(at::kBFloat16),
               b = seeded_normal({9, 7}, 1.0, 1, "b").to(at::kBFloat16);
  const Tensor room = at::full({5, 12}, std::numeric_limits<double>::quiet_NaN(), at::kFloat), c = room.narrow(1, 2, 9);
  ASSERT_TRUE(bf16_product(a, b.t(), c, 0.5, 0));
  EXPECT_CLOSE(c, at::matmul(a.to(at::kDouble), b.t().to(at::kDouble)) * 0.5, Tolerance::rounding(at::kFloat, 7, 1));
  EXPECT_TRUE(room.narrow(1, 0, 2).isnan().all().item<bool>() && room.narrow(1, 11, 1).isnan().all().item<bool>());
}

TEST(Linear, AgreesWithCentralDifferences) {
  expect_gradients([](const auto& in) { return std::vector{parlat::linear(in[0], in[1])}; },
                   {random({2, 3, 4}, "x"), random({5, 4}, "w")});
}

TEST(WidenedBf16, IsTheFp32ResultRoundedOnce) {
  const ForcedGemm forced("widen");
  const Tensor x = random({50, 300}, "x", at::kBFloat16), w = random({70, 300}, "w", at::kBFloat16);
  EXPECT_TRUE(parlat::linear(x, w).equal(at::mm(x.to(at::kFloat), w.to(at::kFloat).t()).to(at::kBFloat16)));
}

// A bf16 sum of ones stops at 256.
TEST(WidenedBf16, WeightGradientSumsTokensInFp32) {
  const ForcedGemm forced("widen");
  const Tensor x = at::ones({4096, 1}, at::kBFloat16), w = at::ones({1, 1}, at::kBFloat16).requires_grad_();
  parlat::linear(x, w).sum().backward();
  EXPECT_EQ(w.grad().item<float>(), 4096);
}

TEST(WidenedBf16, ScratchIsBounded) {
  const ForcedGemm forced("widen");
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Tensor x = at::ones({1200, 2100}, at::kBFloat16), w = at::ones({2000, 2100}, at::kBFloat16);
  meter.reset();
  const Tensor y = parlat::linear(x, w);
  EXPECT_LE(meter.peak_bytes(), static_cast<int64_t>(y.nbytes()) + (int64_t{12} << 20));
}

TEST(Linear, KeepsNothingButItsInputs) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Tensor x = random({20, 30}, "x", at::kBFloat16).requires_grad_(), w = random({40, 30}, "w", at::kBFloat16);
  meter.reset();
  const Tensor y = parlat::linear(x, w);
  EXPECT_EQ(meter.current_bytes(), static_cast<int64_t>(y.nbytes()));
}

TEST(Linear, WrongShapesAreNamed) {
  try {
    parlat::linear(at::ones({2, 3}), at::ones({4, 5}));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "weight: expected shape [*, 3], got [4, 5]");
  }
}

TEST(Linear, UnknownPathIsRefused) {
  const ForcedGemm forced("fast");
  EXPECT_THROW(native_bf16_gemm(), ConfigError);
}

}  // namespace
}  // namespace parlat
