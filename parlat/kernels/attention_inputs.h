#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>
#include <string_view>

#include "parlat/base/range.h"
#include "parlat/kernels/key_ranges.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// What the attention kernels share: how they look at their inputs, check them and keep them for the backward pass.

// On x's device, in the dtype of the arithmetic, without autograd.
at::TensorOptions compute_options(const Tensor& x);
// Zeros like x in the dtype of the arithmetic, metered: what several heads or hops add to.
Tensor wide_zeros(const char* what, const Tensor& x);
// [tokens, columns] of one sequence and head.
inline Tensor one_head(const Tensor& x_BSHd, int64_t b, int64_t h) { return x_BSHd.select(0, b).select(1, h); }
inline Tensor rows(const Tensor& x, Range range) { return x.narrow(0, range.begin, range.size()); }

// Throws ConfigError unless all are bf16, fp32 or fp64, and of one dtype.
struct NamedInput {
  std::string_view name;
  const Tensor& x;
};
void check_dtypes(std::initializer_list<NamedInput> inputs);

// q [B, S, H, d], k [B, T, K, d], v [B, T, K, v], K = H or 1, and their dtypes. Throws ConfigError.
void check_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible);

// Whether a gradient will be asked for.
bool differentiable(std::initializer_list<Tensor> inputs);

// In the context of an autograd function: tensors, and what its backward pass needs besides.
void save_attention(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list tensors,
                    const KeyRanges& visible, double scale);
// One more tensor, an input or an output. Its memory is free as soon as the backward pass, which takes it, lets go of
// it (autograd frees what it saves itself when that returns), unless the graph is to be used again. take
// throws if it was changed in place since, as autograd does of what it saves.
void save_apart(torch::autograd::AutogradContext* ctx, const char* name, const Tensor& x);
Tensor take(torch::autograd::AutogradContext* ctx, const char* name);
const KeyRanges& saved_ranges(torch::autograd::AutogradContext* ctx);
double saved_scale(torch::autograd::AutogradContext* ctx);

}  // namespace parlat
