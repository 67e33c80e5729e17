#include "parlat/kernels/gemm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/base/error.h"
#include "parlat/base/range.h"
#include "parlat/kernels/bf16_product.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

// Rows, columns and depth of a panel: 4 MB of fp32 an operand, large enough that widening costs a few percent of the
// product.
constexpr int64_t kPanel = 1024;

// Room for one panel of an operand in the dtype of the product; none where the operand has it already.
class Panel {
 public:
  Panel(const Tensor& operand, at::ScalarType compute) : same_dtype_(operand.scalar_type() == compute) {
    const int64_t size = std::min(operand.size(0), kPanel) * std::min(operand.size(1), kPanel);
    if (!same_dtype_) room_ = metered("scratch", at::empty({size}, operand.options().dtype(compute)));
  }

  // A tensor of the block's shape, contents undefined.
  Tensor like(const Tensor& block) const {
    return same_dtype_ ? block : room_.narrow(0, 0, block.numel()).view(block.sizes());
  }

  // The block's values, in the order in which they lie in memory.
  Tensor widened(const Tensor& block) const {
    if (same_dtype_) return block;
    const bool transposed = block.stride(0) == 1 && block.stride(1) != 1;
    const Tensor wide = like(transposed ? block.t() : block);
    wide.copy_(transposed ? block.t() : block);
    return transposed ? wide.t() : wide;
  }

 private:
  bool same_dtype_;
  Tensor room_;
};

void multiply(const Tensor& a, const Tensor& b, Tensor c, bool accumulate) {
  at::addmm_out(c, c, a, b, /*beta=*/accumulate ? 1 : 0, /*alpha=*/1);
}

template <typename Body>
void for_each_panel(int64_t size, const Body& body) {
  for (int64_t begin = 0; begin < size; begin += kPanel) body(Range{begin, std::min(begin + kPanel, size)});
}

Tensor block(const Tensor& matrix, Range rows, Range columns) {
  return matrix.narrow(0, rows.begin, rows.size()).narrow(1, columns.begin, columns.size());
}

void multiply_widened(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  const at::ScalarType compute = compute_dtype(a.scalar_type());
  const Panel a_panel(a, compute), b_panel(b, compute), c_panel(c, compute);
  if (c.is_meta()) return;  // nothing else is allocated
  for_each_panel(b.size(1), [&](Range columns) {
    for_each_panel(a.size(0), [&](Range rows) {
      const Tensor c_block = block(c, rows, columns);
      const Tensor sum = accumulate ? c_panel.widened(c_block) : c_panel.like(c_block);
      for_each_panel(a.size(1), [&](Range depth) {
        multiply(a_panel.widened(block(a, rows, depth)), b_panel.widened(block(b, depth, columns)), sum,
                 accumulate || depth.begin > 0);
      });
      if (!sum.is_same(c_block)) c_block.copy_(sum);
    });
  });
}

class Linear : public torch::autograd::Function<Linear> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    ctx->save_for_backward({x, w});
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = w.size(0);
    const Tensor y = metered("projection", at::empty(shape, x.options()));
    gemm(rows_of(x), w.t(), rows_of(y));
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad) {
    refuse_second_gradients("linear");
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1];
    const Tensor grad_rows = rows_of(grad[0]);
    Tensor grad_x, grad_w;
    if (ctx->needs_input_grad(0)) {
      grad_x = metered("activation gradient", at::empty(x.sizes(), x.options()));
      gemm(grad_rows, w, rows_of(grad_x));
    }
    if (ctx->needs_input_grad(1)) grad_w = product_gradient(w, grad_rows.t(), rows_of(x));
    return {grad_x, grad_w};
  }
};

}  // namespace

at::ScalarType compute_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

void gemm(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, bool accumulate) {
  const at::NoGradGuard no_grad;
  check_shape(b_kn, {a_mk.size(1), kAny}, "gemm's B");
  check_shape(c_mn, {a_mk.size(0), b_kn.size(1)}, "gemm's C");
  if (c_mn.numel() == 0) return;
  if (a_mk.size(1) == 0) {
    if (!accumulate) c_mn.zero_();
    return;
  }
  const at::ScalarType dtype = a_mk.scalar_type(), sums = c_mn.scalar_type();
  const bool native = b_kn.scalar_type() == dtype && (dtype == compute_dtype(dtype) || native_bf16_gemm());
  if (native && sums == dtype) return multiply(a_mk, b_kn, c_mn, accumulate);
  const bool here = c_mn.is_cpu() || c_mn.is_meta();
  if (native && here && dtype == at::kBFloat16 && sums == at::kFloat &&
      bf16_product(a_mk, b_kn, c_mn, 1, accumulate ? 1 : 0)) {
    return;
  }
  multiply_widened(a_mk, b_kn, c_mn, accumulate);
}

Tensor linear(const Tensor& x, const Tensor& w_NK) {
  check_shape(w_NK, {kAny, x.size(-1)}, "weight");
  PARLAT_ASSERT(x.scalar_type() == w_NK.scalar_type(), "x {}, weight {}", name(x.scalar_type()),
                name(w_NK.scalar_type()));
  return Linear::apply(x, w_NK);
}

}  // namespace parlat
