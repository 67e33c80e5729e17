#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// Gradients of weights added up where they are kept, so that none exists by itself beside the sum of all: as
// Megatron-LM does (gradient_accumulation_fusion: a product with beta = 1 into main_grad).

// From now on backward() adds every gradient of `weight`, a leaf, to `sum`, of its shape, fp32 (fp64 for fp64), and
// leaves weight.grad() undefined. Functions that know of it (linear, up-projections, attention from latents) add within
// their product; other gradients are added as soon as autograd has all of one pass. torch::autograd::grad() returns
// gradients as ever. An undefined sum ends it.
void sum_gradients(const Tensor& weight, const Tensor& sum);

// The part of the sum that gradients of w are to be added to, w being such a leaf or some of its rows; undefined where
// the gradient goes autograd's way. For backward passes, which then return an undefined gradient.
Tensor gradient_sum(const Tensor& w);

// Throws where gradients are wanted that can be differentiated again (create_graph), which none of our functions has:
// they would come without history, and a penalty on them would lose its term in silence. For backward passes, by name.
void refuse_second_gradients(const char* function);

// The gradient A B of w [m, n] for autograd: A [m, k], B [k, n]. Undefined where it has been added to w's sum.
Tensor product_gradient(const Tensor& w, const Tensor& a_mk, const Tensor& b_kn);

// The gradient of w, found part by part.
class WeightGradient {
 public:
  // dtype: of the parts' sum where w has none.
  WeightGradient(const Tensor& w, at::ScalarType dtype);
  // What parts are added to: zeros, or w's sum.
  const Tensor& place() const { return place_; }
  // For autograd, in w's dtype; undefined where the parts are in w's sum. The place is spent then.
  Tensor finish();

 private:
  const at::ScalarType dtype_;
  bool summed_;
  Tensor place_;
};

}  // namespace parlat
