#include "parlat/mla/attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_attention.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Columns [first, first + count) of head h, all tokens: [B S, count].
Tensor head_columns(const Tensor& x_BSHd, int64_t h, int64_t first, int64_t count) {
  return x_BSHd.flatten(0, 1).select(1, h).narrow(1, first, count);
}

// The N key rows and the V value rows of head h in kv_b_proj's rows.
Tensor key_rows(const Tensor& w_ukv, int64_t h, int64_t d_nope, int64_t d_v) {
  return w_ukv.narrow(0, h * (d_nope + d_v), d_nope);
}
Tensor value_rows(const Tensor& w_ukv, int64_t h, int64_t d_nope, int64_t d_v) {
  return w_ukv.narrow(0, h * (d_nope + d_v) + d_nope, d_v);
}

// q [B, S, h, N+R] -> [B, S, h, L+R]: q_nope w_uk[h], then q_rope.
class AbsorbQuery : public Function<AbsorbQuery> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& w, int64_t d_nope, int64_t d_v) {
    ctx->save_for_backward({q, w});
    ctx->saved_data["d_nope"] = d_nope;
    ctx->saved_data["d_v"] = d_v;
    const int64_t d_latent = w.size(1), d_rope = q.size(3) - d_nope;
    const Tensor absorbed =
        metered("absorbed query", at::empty({q.size(0), q.size(1), q.size(2), d_latent + d_rope}, q.options()));
    for (int64_t h = 0; h < q.size(2); ++h) {
      gemm(head_columns(q, h, 0, d_nope), key_rows(w, h, d_nope, d_v), head_columns(absorbed, h, 0, d_latent));
    }
    absorbed.narrow(3, d_latent, d_rope).copy_(q.narrow(3, d_nope, d_rope));
    return absorbed;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("absorb query");
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &w = saved[1];
    const int64_t d_nope = ctx->saved_data["d_nope"].toInt(), d_v = ctx->saved_data["d_v"].toInt();
    const int64_t d_latent = w.size(1), d_rope = q.size(3) - d_nope;
    const Tensor grad_q = metered("query gradient", at::empty(q.sizes(), q.options()));
    WeightGradient grad_w(w, w.scalar_type());
    for (int64_t h = 0; h < q.size(2); ++h) {
      const Tensor grad_absorbed = head_columns(grad[0], h, 0, d_latent);
      gemm(grad_absorbed, key_rows(w, h, d_nope, d_v).t(), head_columns(grad_q, h, 0, d_nope));
      gemm(head_columns(q, h, 0, d_nope).t(), grad_absorbed, key_rows(grad_w.place(), h, d_nope, d_v),
           /*accumulate=*/true);
    }
    grad_q.narrow(3, d_nope, d_rope).copy_(grad[0].narrow(3, d_latent, d_rope));
    return {grad_q, grad_w.finish(), {}, {}};
  }
};

// out_latent [B, S, h, L] -> [B, S, h, V]: out_latent w_uv[h]^T.
class UnabsorbOutput : public Function<UnabsorbOutput> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& out_latent, const Tensor& w, int64_t d_nope, int64_t d_v) {
    ctx->save_for_backward({out_latent, w});
    ctx->saved_data["d_nope"] = d_nope;
    ctx->saved_data["d_v"] = d_v;
    const std::vector<int64_t> shape = {out_latent.size(0), out_latent.size(1), out_latent.size(2), d_v};
    const Tensor out = metered("out", at::empty(shape, out_latent.options()));
    for (int64_t h = 0; h < out_latent.size(2); ++h) {
      gemm(head_columns(out_latent, h, 0, w.size(1)), value_rows(w, h, d_nope, d_v).t(), head_columns(out, h, 0, d_v));
    }
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("unabsorb output");
    const auto saved = ctx->get_saved_variables();
    const Tensor &out_latent = saved[0], &w = saved[1];
    const int64_t d_nope = ctx->saved_data["d_nope"].toInt(), d_v = ctx->saved_data["d_v"].toInt();
    const Tensor grad_latent = metered("absorbed out gradient", at::empty(out_latent.sizes(), out_latent.options()));
    WeightGradient grad_w(w, w.scalar_type());
    for (int64_t h = 0; h < out_latent.size(2); ++h) {
      const Tensor grad_out = head_columns(grad[0], h, 0, d_v);
      gemm(grad_out, value_rows(w, h, d_nope, d_v), head_columns(grad_latent, h, 0, w.size(1)));
      gemm(grad_out.t(), head_columns(out_latent, h, 0, w.size(1)), value_rows(grad_w.place(), h, d_nope, d_v),
           /*accumulate=*/true);
    }
    return {grad_latent, grad_w.finish(), {}, {}};
  }
};

Tensor attend(AttentionKernel kernel, const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv,
              const KeyRanges& visible, double scale) {
  return kernel == AttentionKernel::kFused ? fused_attention(q_BSHd, k_BTKd, v_BTKv, visible, scale)
                                           : eager_attention(q_BSHd, k_BTKd, v_BTKv, visible, scale);
}

}  // namespace

Tensor attend_explicit(const MlaSpec& spec, const Tensor& q_BSHd, const KeysValues& kv, const KeyRanges& visible,
                       AttentionKernel kernel) {
  check_shape(q_BSHd, {kAny, kAny, kAny, spec.dims.d_qk()}, "q");
  check_shape(kv.k_BTHd, {kAny, kAny, q_BSHd.size(2), spec.dims.d_qk()}, "k");
  check_shape(kv.v_BTHV, {kAny, kAny, q_BSHd.size(2), spec.dims.d_v}, "v");
  return attend(kernel, q_BSHd, kv.k_BTHd, kv.v_BTHV, visible, spec.softmax_scale());
}

Tensor attend_latent(const MlaSpec& spec, const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                     const KeyRanges& visible, const AttentionOptions& options) {
  if (options.rebuilds_keys()) {
    check_shape(q_BSHd, {kAny, kAny, kAny, spec.dims.d_qk()}, "q");
    check_shape(latent_BTd, {kAny, kAny, spec.dims.d_cache()}, "latent");
    return fused_latent_attention(q_BSHd, latent_BTd, w_ukv_hL, visible, spec.softmax_scale());
  }
  return attend_explicit(spec, q_BSHd, up_project(w_ukv_hL, latent_BTd, spec.dims), visible, options.kernel);
}

Tensor attend_absorbed(const MlaSpec& spec, const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                       const KeyRanges& visible, AttentionKernel kernel) {
  const MlaDims& d = spec.dims;
  check_shape(q_BSHd, {kAny, kAny, kAny, d.d_qk()}, "q");
  check_shape(latent_BTd, {kAny, kAny, d.d_cache()}, "latent");
  check_shape(w_ukv_hL, {q_BSHd.size(2) * (d.d_nope + d.d_v), d.d_latent}, "w_ukv");
  const Tensor q_absorbed_BSHd = AbsorbQuery::apply(q_BSHd, w_ukv_hL, d.d_nope, d.d_v);
  const Tensor key_BTKd = latent_BTd.unsqueeze(2), value_BTKL = key_BTKd.narrow(3, 0, d.d_latent);
  const Tensor out_latent_BSHL =
      metered("absorbed out", attend(kernel, q_absorbed_BSHd, key_BTKd, value_BTKL, visible, spec.softmax_scale()));
  return UnabsorbOutput::apply(out_latent_BSHL, w_ukv_hL, d.d_nope, d.d_v);
}

}  // namespace parlat
