#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/model/moe.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor product(const Tensor& a_mk, const Tensor& b_kn) {
  const Tensor c_mn = at::empty({a_mk.size(0), b_kn.size(1)}, a_mk.options());
  gemm(a_mk, b_kn, c_mn);
  return c_mn;
}

// Keeps gate and up only: their product, as wide as either, is made again in the backward pass.
struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_nD, const Tensor& w_gate, const Tensor& w_up,
                        const Tensor& w_down) {
    const Tensor gate_nF = metered("mlp gate and up", parlat::linear(x_nD, w_gate));
    const Tensor up_nF = metered("mlp gate and up", parlat::linear(x_nD, w_up));
    ctx->save_for_backward({x_nD, w_gate, w_up, w_down, gate_nF, up_nF});
    return parlat::linear(at::silu(gate_nF).mul_(up_nF), w_down);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("mlp");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x_nD = saved[0], &w_gate = saved[1], &w_up = saved[2], &w_down = saved[3];
    const Tensor &gate_nF = saved[4], &up_nF = saved[5], &d_out_nD = grads[0];

    const Tensor silu_nF = at::silu(gate_nF);
    const Tensor d_w_down = product_gradient(w_down, d_out_nD.t(), silu_nF * up_nF);
    const Tensor d_product_nF = product(d_out_nD, w_down);
    const Tensor d_up_nF = d_product_nF * silu_nF;
    const Tensor d_gate_nF = at::silu_backward(d_product_nF * up_nF, gate_nF);

    const Tensor d_x_nD = at::empty(x_nD.sizes(), x_nD.options().dtype(compute_dtype(x_nD.scalar_type())));
    gemm(d_gate_nF, w_gate, d_x_nD);
    gemm(d_up_nF, w_up, d_x_nD, /*accumulate=*/true);
    return {d_x_nD.to(x_nD.scalar_type()), product_gradient(w_gate, d_gate_nF.t(), x_nD),
            product_gradient(w_up, d_up_nF.t(), x_nD), d_w_down};
  }
};

}  // namespace

Tensor mlp(const MlpWeights& w, const Tensor& x) {
  const int64_t d_model = w.w_down.size(0);
  PARLAT_ASSERT(x.size(-1) == d_model, "x {} and w_down {}", shape_text(x.sizes()), shape_text(w.w_down.sizes()));
  return SwiGlu::apply(x.reshape({x.numel() / d_model, d_model}), w.w_gate, w.w_up, w.w_down).view(x.sizes());
}

}  // namespace parlat
