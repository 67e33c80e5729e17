#include "parlat/kernels/gradient_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

// What knows of no sum leaves its gradient with autograd, which hands it over here.
class AddTo final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AddTo(Tensor to) : sum(std::move(to)) {}
  void operator()(const Tensor& weight) override {
    if (!weight.grad().defined()) return;
    const at::NoGradGuard no_grad;
    sum.add_(weight.grad().to(sum.scalar_type()));
    weight.mutable_grad().reset();
  }

  const Tensor sum;
};

// Of grad() and of backward() with inputs, whose caller is given gradients or decides where they go.
bool some_gradients_only() {
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && !wanted->empty();
}

}  // namespace

void sum_gradients(const Tensor& weight, const Tensor& sum) {
  PARLAT_ASSERT(weight.is_leaf() && weight.requires_grad(), "a weight of shape {} is no leaf",
                shape_text(weight.sizes()));
  if (!sum.defined()) return torch::autograd::impl::set_post_acc_grad_hooks(weight, nullptr);
  PARLAT_ASSERT(sum.sizes() == weight.sizes() && sum.scalar_type() == compute_dtype(weight.scalar_type()),
                "weight {} {}, sum {} {}", name(weight.scalar_type()), shape_text(weight.sizes()),
                name(sum.scalar_type()), shape_text(sum.sizes()));
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<AddTo>(sum));
}

Tensor gradient_sum(const Tensor& w) {
  if (!w.requires_grad() || some_gradients_only()) return {};
  const Tensor leaf = w.is_view() ? Tensor(w._base()) : w;
  const auto* const hook = dynamic_cast<const AddTo*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
  if (hook == nullptr) return {};
  if (leaf.is_same(w)) return hook->sum;
  const bool rows = w.dim() == 2 && leaf.dim() == 2 && w.size(1) == leaf.size(1) && w.strides() == leaf.strides();
  if (!rows) return {};
  return hook->sum.narrow(0, (w.storage_offset() - leaf.storage_offset()) / leaf.stride(0), w.size(0));
}

void refuse_second_gradients(const char* function) {
  PARLAT_ASSERT(!at::GradMode::is_enabled(), "the gradient of '{}' is not differentiable", function);
}

Tensor product_gradient(const Tensor& w, const Tensor& a_mk, const Tensor& b_kn) {
  if (const Tensor sum = gradient_sum(w); sum.defined()) {
    gemm(a_mk, b_kn, sum, /*accumulate=*/true);
    return {};
  }
  const Tensor gradient = metered("weight gradient", at::empty(w.sizes(), w.options().requires_grad(false)));
  gemm(a_mk, b_kn, gradient);
  return gradient;
}

WeightGradient::WeightGradient(const Tensor& w, at::ScalarType dtype)
    : dtype_(w.scalar_type()), place_(gradient_sum(w)) {
  summed_ = place_.defined();
  if (summed_) return;
  place_ = metered("weight gradient", at::zeros(w.sizes(), w.options().dtype(dtype).requires_grad(false)));
}

Tensor WeightGradient::finish() {
  const Tensor place = std::exchange(place_, Tensor());
  return summed_ ? Tensor() : metered("weight gradient", place.to(dtype_));
}

}  // namespace parlat
