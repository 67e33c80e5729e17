// Gradients that are added where they are kept, against those that autograd hands out.
#include "parlat/kernels/gradient_sum.h"

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/fill.h"
#include "parlat/tensor/memory_meter.h"
#include "tests/expect_close.h"
#include "tests/kernels/forced_gemm.h"

namespace parlat {
namespace {

Tensor random(at::IntArrayRef shape, const char* name, at::ScalarType dtype) {
  return seeded_normal(shape, 1, 3, name, dtype);
}

class GradientSum : public OnEveryGemmPath {
 protected:
  // A leaf whose gradients are added to `sum`.
  struct Summed {
    Tensor weight, sum;
  };
  Summed summed(at::IntArrayRef shape) const {
    const Tensor weight = random(shape, "w", dtype()).requires_grad_();
    const Tensor sum = at::zeros(shape, compute_dtype(dtype()));
    sum_gradients(weight, sum);
    return {weight, sum};
  }
};

// The sum starts from zero, so rounded it is the gradient, to the bit.
TEST_P(GradientSum, OfAProductIsItsGradient) {
  const Tensor x = random({2, 300, 12}, "x", dtype()), grad = random({2, 300, 7}, "grad", dtype());
  const Summed w = summed({7, 12});
  const Tensor plain = w.weight.detach().clone().requires_grad_();
  parlat::linear(x, plain).backward(grad);
  parlat::linear(x, w.weight).backward(grad);
  EXPECT_TRUE(w.sum.to(dtype()).equal(plain.grad()));
  EXPECT_FALSE(w.weight.grad().defined());
}

TEST_P(GradientSum, AddsUpPassesInTheWiderDtype) {
  const Tensor x = at::ones({1, 1}, dtype());
  const Summed w = summed({1, 1});
  for (int i = 0; i < 1000; ++i) parlat::linear(x, w.weight).sum().backward();  // a bf16 sum of ones stops at 256
  EXPECT_EQ(w.sum.item<double>(), 1000);
}

// Rows of a weight, as a rank that has some heads uses them; and what knows of no sum.
TEST_P(GradientSum, OfRowsAndOfOtherFunctions) {
  const Tensor x = random({30, 12}, "x", dtype()), grad = random({30, 4}, "grad", dtype());
  const auto loss = [&](const Tensor& w) {
    return (parlat::linear(x, w.narrow(0, 3, 4)) * grad).sum() + (w * w.detach()).sum();
  };
  const Summed w = summed({9, 12});
  const Tensor wide = w.weight.detach().to(at::kDouble).requires_grad_();
  loss(w.weight).backward();
  ((at::matmul(x.to(at::kDouble), wide.narrow(0, 3, 4).t()) * grad.to(at::kDouble)).sum() +
   (wide * wide.detach()).sum())
      .backward();
  EXPECT_CLOSE(w.sum, wide.grad(), Tolerance::rounding(dtype(), 31, 2));
}

TEST_P(GradientSum, LeavesGradientsThatAreAskedFor) {
  const Tensor x = random({30, 12}, "x", dtype());
  const Summed w = summed({9, 12});
  const Tensor plain = w.weight.detach().clone().requires_grad_();
  for (const bool rows : {false, true}) {
    const auto loss = [&](const Tensor& of) { return parlat::linear(x, rows ? of.narrow(0, 2, 5) : of).sum(); };
    const Tensor got = torch::autograd::grad({loss(w.weight)}, {w.weight})[0];
    EXPECT_TRUE(got.equal(torch::autograd::grad({loss(plain)}, {plain})[0]));
  }
  EXPECT_EQ(w.sum.abs().sum().item<double>(), 0);
}

TEST_P(GradientSum, EndsWithAnUndefinedOne) {
  const Summed w = summed({9, 12});
  sum_gradients(w.weight, {});
  parlat::linear(random({30, 12}, "x", dtype()), w.weight).sum().backward();
  EXPECT_EQ(w.sum.abs().sum().item<double>(), 0);
  EXPECT_TRUE(w.weight.grad().defined());
}

// Beside the sum no second gradient exists, of the whole weight or of its rows: a gemm's scratch at most.
TEST_P(GradientSum, NeedsNoSecondGradient) {
  constexpr int64_t kRows = 9000, kColumns = 3000;
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Tensor w = at::zeros({kRows, kColumns}, dtype()).requires_grad_();
  sum_gradients(w, at::zeros({kRows, kColumns}, compute_dtype(dtype())));
  const Tensor x = at::zeros({2, kColumns}, dtype());
  for (const bool rows : {false, true}) {
    const Tensor y = parlat::linear(x, rows ? w.narrow(0, 5, kRows / 2) : w);
    const Tensor grad = at::zeros_like(y);
    meter.reset();
    y.backward(grad);
    EXPECT_LE(meter.peak_bytes(), int64_t{26} << 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, GradientSum, kGemmPaths, gemm_path_name);

TEST(GradientSumOf, WrongSumsIsABug) {
  const Tensor w = at::zeros({2, 3}, at::kBFloat16).requires_grad_();
  EXPECT_THROW(sum_gradients(w, at::zeros({2, 3}, at::kBFloat16)), InternalError);
  EXPECT_THROW(sum_gradients(w, at::zeros({3, 2})), InternalError);
  EXPECT_THROW(sum_gradients(w * 2, at::zeros({2, 3})), InternalError);
}

}  // namespace
}  // namespace parlat
