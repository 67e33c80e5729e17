#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>

#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"

namespace parlat {

using TensorFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

// Gradients of a fixed random combination of f's outputs, by autograd and by central differences, in fp64. With a step
// of eps^(1/3) truncation and cancellation both come to about eps^(2/3) of the combination, whose terms add up like a
// random walk.
inline void expect_gradients(const TensorFunction& f, const std::vector<Tensor>& inputs) {
  const double eps = std::numeric_limits<double>::epsilon(), step = std::cbrt(eps);
  std::vector<Tensor> leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.to(at::kDouble).clone().requires_grad_());
  const auto combination = [&] {
    Tensor sum = at::zeros({}, at::kDouble);
    int64_t index = 0;
    for (const Tensor& output : f(leaves)) {
      sum = sum + (output * seeded_normal(output.sizes(), 1, 11, std::to_string(index++), at::kDouble)).sum();
    }
    return sum;
  };
  const auto got = torch::autograd::grad({combination()}, {leaves.begin(), leaves.end()});

  const at::NoGradGuard no_grad;
  int64_t elements = 0;
  for (const Tensor& output : f(leaves)) elements += output.numel();
  constexpr double kTail = 8;
  const Tolerance tolerance{kTail * (std::sqrt(static_cast<double>(elements)) + 2) * step * step};
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Tensor want = at::empty_like(got[i], at::MemoryFormat::Contiguous), flat = leaves[i].view(-1);
    for (int64_t j = 0; j < flat.numel(); ++j) {
      const double x = flat[j].item<double>();
      flat[j] = x + step;
      const double above = combination().item<double>();
      flat[j] = x - step;
      const double below = combination().item<double>();
      flat[j] = x;
      want.view(-1)[j] = (above - below) / (2 * step);
    }
    // The differences' errors are those of the combination, however small a row's gradient is.
    const double max = scale_of(want).max;
    const Comparison compared = compare(got[i], want, tolerance, {max, max});
    EXPECT_TRUE(compared.close) << "gradient of input " << i << ": " << compared.text();
  }
}

}  // namespace parlat
