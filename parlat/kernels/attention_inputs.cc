#include "parlat/kernels/attention_inputs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"

namespace parlat {

namespace {

struct SavedRanges final : torch::CustomClassHolder {
  explicit SavedRanges(const KeyRanges& ranges) : visible(ranges) {}
  KeyRanges visible;
};

}  // namespace

at::TensorOptions compute_options(const Tensor& x) {
  return x.options().dtype(compute_dtype(x.scalar_type())).requires_grad(false);
}

void check_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible) {
  const int64_t n_heads = q_BSHd.size(2), n_key_heads = k_BTKd.size(2) == 1 ? 1 : n_heads;
  check_shape(q_BSHd, {visible.batch(), visible.n_queries(), kAny, kAny}, "q");
  check_shape(k_BTKd, {visible.batch(), visible.n_keys(), n_key_heads, q_BSHd.size(3)}, "k");
  check_shape(v_BTKv, {visible.batch(), visible.n_keys(), n_key_heads, kAny}, "v");
  PARLAT_ASSERT(k_BTKd.scalar_type() == q_BSHd.scalar_type() && v_BTKv.scalar_type() == q_BSHd.scalar_type(),
                "q {}, k {}, v {}", name(q_BSHd.scalar_type()), name(k_BTKd.scalar_type()), name(v_BTKv.scalar_type()));
}

bool differentiable(std::initializer_list<Tensor> inputs) {
  return at::GradMode::is_enabled() &&
         std::any_of(inputs.begin(), inputs.end(), [](const Tensor& x) { return x.requires_grad(); });
}

void save_attention(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list tensors,
                    const KeyRanges& visible, double scale) {
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["visible"] = c10::IValue::make_capsule(c10::make_intrusive<SavedRanges>(visible));
  ctx->saved_data["scale"] = scale;
}

void save_apart(torch::autograd::AutogradContext* ctx, const char* name, const Tensor& x) {
  ctx->saved_data[name] = x.detach();  // an output holds the graph that would hold it
}

Tensor take(torch::autograd::AutogradContext* ctx, const char* name) {
  Tensor x = ctx->saved_data.at(name).toTensor();
  if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data.erase(name);
  return x;
}

const KeyRanges& saved_ranges(torch::autograd::AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<SavedRanges>(ctx->saved_data["visible"].toCapsule())->visible;
}

double saved_scale(torch::autograd::AutogradContext* ctx) { return ctx->saved_data["scale"].toDouble(); }

}  // namespace parlat
