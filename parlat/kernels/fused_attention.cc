#include "parlat/kernels/fused_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/base/error.h"
#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/fused_passes.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Attended {
  Tensor out_BSHv, lse_BSH;
};

Attended attend(const FusedQuery& query, const KeySource& keys) {
  const Tensor& q = query.q_BSHd;
  const at::TensorOptions options = q.options().requires_grad(false);
  const Attended attended{metered("out", at::empty({q.size(0), q.size(1), q.size(2), keys.d_v()}, options)),
                          metered("lse", at::empty({q.size(0), q.size(1), q.size(2)}, compute_options(q)))};
  fused_forward(query, keys, attended.out_BSHv, attended.lse_BSH);
  return attended;
}

Tensor plain_zeros(const char* what, const Tensor& x) {
  return metered(what, at::zeros(x.sizes(), x.options().requires_grad(false)));
}

class FusedExplicit : public Function<FusedExplicit> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const KeyRanges& visible, double scale) {
    const Attended attended = attend({q, visible, scale}, ExplicitKeys(k, v));
    save_attention(ctx, {q, k, v, attended.lse_BSH}, visible, scale);
    save_apart(ctx, "out", attended.out_BSHv);
    return attended.out_BSHv;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("fused attention");
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const Tensor along = out_along_gradient(take(ctx, "out"), grad[0]);
    const bool shared = k.size(2) == 1;
    const auto zeros = shared ? wide_zeros : plain_zeros;
    const Tensor grad_q = plain_zeros("query gradient", q);
    const Tensor grad_k = zeros("key gradient", k), grad_v = zeros("value gradient", v);
    fused_backward({q, saved_ranges(ctx), saved_scale(ctx)}, ExplicitKeys(k, v, grad_k, grad_v), along, saved[3],
                   grad[0], grad_q);
    return {grad_q, metered("key gradient", grad_k.to(k.scalar_type())),
            metered("value gradient", grad_v.to(v.scalar_type())), Tensor(), Tensor()};
  }
};

class FusedLatent : public Function<FusedLatent> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& latent, const Tensor& w,
                        const KeyRanges& visible, double scale, int64_t d_nope) {
    const Attended attended = attend({q, visible, scale}, LatentKeys(latent, w, q.size(2), d_nope));
    save_attention(ctx, {q, latent, w, attended.lse_BSH}, visible, scale);
    save_apart(ctx, "out", attended.out_BSHv);
    ctx->saved_data["d_nope"] = d_nope;
    return attended.out_BSHv;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("fused latent attention");
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &latent = saved[1], &w = saved[2];
    const Tensor along = out_along_gradient(take(ctx, "out"), grad[0]);
    const Tensor grad_q = plain_zeros("query gradient", q), grad_latent = wide_zeros("latent gradient", latent);
    WeightGradient grad_w(w, w.scalar_type());
    const LatentKeys keys(latent, w, q.size(2), ctx->saved_data["d_nope"].toInt(), grad_latent, grad_w.place());
    fused_backward({q, saved_ranges(ctx), saved_scale(ctx)}, keys, along, saved[3], grad[0], grad_q);
    return {grad_q, metered("latent gradient", grad_latent.to(latent.scalar_type())), grad_w.finish(), {}, {}, {}};
  }
};

}  // namespace

Tensor fused_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible,
                       double softmax_scale) {
  check_attention(q_BSHd, k_BTKd, v_BTKv, visible);
  if (differentiable({q_BSHd, k_BTKd, v_BTKv})) {
    return FusedExplicit::apply(q_BSHd, k_BTKd, v_BTKv, visible, softmax_scale);
  }
  return attend({q_BSHd, visible, softmax_scale}, ExplicitKeys(k_BTKd, v_BTKv)).out_BSHv;
}

Tensor fused_latent_attention(const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                              const KeyRanges& visible, double softmax_scale) {
  check_shape(q_BSHd, {visible.batch(), visible.n_queries(), kAny, kAny}, "q");
  check_shape(latent_BTd, {visible.batch(), visible.n_keys(), kAny}, "latent");
  check_shape(w_ukv_hL, {kAny, kAny}, "w_ukv");
  const int64_t n_heads = q_BSHd.size(2), d_rope = latent_BTd.size(2) - w_ukv_hL.size(1);
  const int64_t d_nope = q_BSHd.size(3) - d_rope;
  if (d_rope < 0 || d_nope <= 0 || n_heads == 0 || w_ukv_hL.size(0) % n_heads != 0 ||
      w_ukv_hL.size(0) / n_heads <= d_nope) {
    throw ConfigError(
        "fused latent attention: expected w_ukv [H (N+V), L] of q [B, S, H, N+R] and latent [B, T, L+R], "
        "got {}, {} and {}",
        shape_text(w_ukv_hL.sizes()), shape_text(q_BSHd.sizes()), shape_text(latent_BTd.sizes()));
  }
  check_dtypes({{"q", q_BSHd}, {"latent", latent_BTd}});
  if (differentiable({q_BSHd, latent_BTd, w_ukv_hL})) {
    check_dtypes({{"q", q_BSHd}, {"w_ukv", w_ukv_hL}});
    return FusedLatent::apply(q_BSHd, latent_BTd, w_ukv_hL, visible, softmax_scale, d_nope);
  }
  return attend({q_BSHd, visible, softmax_scale}, LatentKeys(latent_BTd, w_ukv_hL, n_heads, d_nope)).out_BSHv;
}

}  // namespace parlat
