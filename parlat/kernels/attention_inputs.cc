#include "parlat/kernels/attention_inputs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/memory_meter.h"

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

Tensor wide_zeros(const char* what, const Tensor& x) { return metered(what, at::zeros(x.sizes(), compute_options(x))); }

void check_dtypes(std::initializer_list<NamedInput> inputs) {
  const NamedInput& first = *inputs.begin();
  const at::ScalarType dtype = first.x.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kFloat && dtype != at::kDouble) {
    throw ConfigError("{}: expected bf16, fp32 or fp64, got {}", first.name, name(dtype));
  }
  for (const NamedInput& input : inputs) {
    if (input.x.scalar_type() == dtype) continue;
    throw ConfigError("{}: expected {} as {}, got {}", input.name, name(dtype), first.name,
                      name(input.x.scalar_type()));
  }
}

void check_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible) {
  check_shape(q_BSHd, {visible.batch(), visible.n_queries(), kAny, kAny}, "q");
  const int64_t n_key_heads = k_BTKd.dim() == 4 && k_BTKd.size(2) == 1 ? 1 : q_BSHd.size(2);
  check_shape(k_BTKd, {visible.batch(), visible.n_keys(), n_key_heads, q_BSHd.size(3)}, "k");
  check_shape(v_BTKv, {visible.batch(), visible.n_keys(), n_key_heads, kAny}, "v");
  check_dtypes({{"q", q_BSHd}, {"k", k_BTKd}, {"v", v_BTKv}});
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
  ctx->saved_data[name] = std::make_tuple(x.detach(), x._version());  // an output holds the graph that would hold it
}

Tensor take(torch::autograd::AutogradContext* ctx, const char* name) {
  auto [x, version] = ctx->saved_data.at(name).to<std::tuple<Tensor, int64_t>>();
  PARLAT_ASSERT(x._version() == version,
                "'{}' was changed in place after the forward pass: expected version {}, got {}", name, version,
                x._version());
  if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data.erase(name);
  return x;
}

const KeyRanges& saved_ranges(torch::autograd::AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<SavedRanges>(ctx->saved_data["visible"].toCapsule())->visible;
}

double saved_scale(torch::autograd::AutogradContext* ctx) { return ctx->saved_data["scale"].toDouble(); }

}  // namespace parlat
