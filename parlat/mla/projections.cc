#include "parlat/mla/projections.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/mla/rms_rows.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class RmsNorm : public Function<RmsNorm> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    const Tensor y = metered("normalised", at::empty(x.sizes(), x.options()));
    ctx->save_for_backward({x, weight, rms_rows(rows_of(x), weight, eps, rows_of(y))});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("rms norm");
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &inverse_rms = saved[2];
    const Tensor grad_x = metered("activation gradient", at::empty(x.sizes(), x.options()));
    const Tensor grad_weight = rms_rows_backward(rows_of(x), weight, inverse_rms, rows_of(grad[0]), rows_of(grad_x));
    return {grad_x, grad_weight, {}};
  }
};

// x w^T of x = rms_norm(raw), which exists only during a product: the backward pass normalises again.
class NormedLinear : public Function<NormedLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& raw, const Tensor& norm, const Tensor& w, double eps) {
    const auto [x, inverse_rms] = normalise(raw, norm, eps);
    ctx->save_for_backward({raw, norm, w, inverse_rms});
    ctx->saved_data["eps"] = eps;
    std::vector<int64_t> shape = raw.sizes().vec();
    shape.back() = w.size(0);
    const Tensor y = metered("projection", at::empty(shape, raw.options()));
    gemm(x, w.t(), rows_of(y));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("normed linear");
    const auto saved = ctx->get_saved_variables();
    const Tensor &raw = saved[0], &norm = saved[1], &w = saved[2], &inverse_rms = saved[3];
    const Tensor grad_rows = rows_of(grad[0]);
    Tensor grad_w, grad_raw, grad_norm;
    if (ctx->needs_input_grad(2)) {
      grad_w = product_gradient(w, grad_rows.t(), normalise(raw, norm, ctx->saved_data["eps"].toDouble()).first);
    }
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1)) {
      const Tensor grad_x = metered("activation gradient", at::empty(rows_of(raw).sizes(), raw.options()));
      gemm(grad_rows, w, grad_x);
      grad_raw = metered("activation gradient", at::empty(raw.sizes(), raw.options()));
      grad_norm = rms_rows_backward(rows_of(raw), norm, inverse_rms, grad_x, rows_of(grad_raw));
    }
    return {grad_raw, grad_norm, grad_w, {}};
  }

 private:
  // Rows of raw, normalised, and their 1/rms.
  static std::pair<Tensor, Tensor> normalise(const Tensor& raw, const Tensor& norm, double eps) {
    const Tensor x = metered("normalised", at::empty(rows_of(raw).sizes(), raw.options()));
    return {x, rms_rows(rows_of(raw), norm, eps, x)};
  }
};

// Rotates the rope columns of every head of q [B, S, H (N+R)] where they lie: q is a fresh product that nobody else
// holds.
class RotateQuery : public Function<RotateQuery> {
 public:
  static Tensor forward(AutogradContext* ctx, Tensor q, int64_t n_heads, const Tensor& cos, const Tensor& sin,
                        bool interleaved) {
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["n_heads"] = n_heads;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->mark_dirty({q});
    rotate_heads(q, n_heads, {cos, sin, interleaved}, Rotation::kForward);
    return q;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("rotate query");
    const auto saved = ctx->get_saved_variables();
    const Tensor grad_q = metered("query gradient", grad[0].clone(at::MemoryFormat::Contiguous));
    rotate_heads(grad_q, ctx->saved_data["n_heads"].toInt(),
                 {saved[0], saved[1], ctx->saved_data["interleaved"].toBool()}, Rotation::kTransposed);
    return {grad_q, {}, {}, {}, {}};
  }

 private:
  static void rotate_heads(const Tensor& q, int64_t n_heads, const RopeTable& table, Rotation rotation) {
    const Tensor q_BSHd = q.view({q.size(0), q.size(1), n_heads, q.size(2) / n_heads});
    const int64_t d_rope = 2 * table.cos_BSr.size(2);
    rotate(q_BSHd.narrow(3, q_BSHd.size(3) - d_rope, d_rope), table, rotation);
  }
};

// [B, S, L+R]: norm of the first L columns and rotation of the last R in one tensor.
class FinishLatent : public Function<FinishLatent> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& raw, const Tensor& kv_norm, double eps, const Tensor& cos,
                        const Tensor& sin, bool interleaved) {
    const Tensor latent = metered("latent", at::empty(raw.sizes(), raw.options()));
    const int64_t d_latent = kv_norm.size(0);
    const Tensor inverse_rms = rms_rows(c_kv(raw, d_latent), kv_norm, eps, c_kv(latent, d_latent));
    k_rope(latent, d_latent).copy_(k_rope(raw, d_latent));
    rotate(k_rope(latent, d_latent), {cos, sin, interleaved}, Rotation::kForward);
    ctx->save_for_backward({raw, kv_norm, inverse_rms, cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    return latent;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("latent");
    const auto saved = ctx->get_saved_variables();
    const Tensor &raw = saved[0], &kv_norm = saved[1], &inverse_rms = saved[2];
    const int64_t d_latent = kv_norm.size(0);
    const Tensor grad_raw = metered("latent gradient", at::empty(raw.sizes(), raw.options()));
    const Tensor grad_norm =
        rms_rows_backward(c_kv(raw, d_latent), kv_norm, inverse_rms, c_kv(grad[0], d_latent), c_kv(grad_raw, d_latent));
    k_rope(grad_raw, d_latent).copy_(k_rope(grad[0], d_latent));
    rotate(k_rope(grad_raw, d_latent), {saved[3], saved[4], ctx->saved_data["interleaved"].toBool()},
           Rotation::kTransposed);
    return {grad_raw, grad_norm, {}, {}, {}, {}};
  }

 private:
  static Tensor c_kv(const Tensor& latent, int64_t d_latent) { return rows_of(latent).narrow(1, 0, d_latent); }
  // As one head, [B, S, 1, R].
  static Tensor k_rope(const Tensor& latent, int64_t d_latent) {
    return latent.narrow(2, d_latent, latent.size(2) - d_latent).unsqueeze(2);
  }
};

// Keys and values straight from the latent: the product exists only until its columns are in k and v, and the rope key
// only in the latent and in k.
class UpProject : public Function<UpProject> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& w, const Tensor& latent, int64_t d_nope,
                               int64_t d_v) {
    ctx->save_for_backward({w, latent});
    ctx->saved_data["d_nope"] = d_nope;
    const int64_t d_latent = w.size(1), d_rope = latent.size(2) - d_latent, n_heads = w.size(0) / (d_nope + d_v);
    const std::vector<int64_t> tokens = {latent.size(0), latent.size(1), n_heads};
    const Tensor product =
        metered("keys with values", at::empty({tokens[0], tokens[1], n_heads, d_nope + d_v}, latent.options()));
    gemm(rows_of(latent).narrow(1, 0, d_latent), w.t(), product.view({-1, w.size(0)}));

    const Tensor k = metered("key", at::empty({tokens[0], tokens[1], n_heads, d_nope + d_rope}, latent.options()));
    k.narrow(3, 0, d_nope).copy_(product.narrow(3, 0, d_nope));
    k.narrow(3, d_nope, d_rope).copy_(latent.narrow(2, d_latent, d_rope).unsqueeze(2));
    return {k, metered("value", product.narrow(3, d_nope, d_v).contiguous())};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("up-projection");
    const auto saved = ctx->get_saved_variables();
    const Tensor &w = saved[0], &latent = saved[1], &grad_k = grad[0], &grad_v = grad[1];
    const int64_t d_nope = ctx->saved_data["d_nope"].toInt(), d_latent = w.size(1);
    const int64_t d_rope = latent.size(2) - d_latent;
    const Tensor product = metered("gradient of keys with values", at::cat({grad_k.narrow(3, 0, d_nope), grad_v}, 3))
                               .view({-1, w.size(0)});

    Tensor grad_w, grad_latent;
    if (ctx->needs_input_grad(0)) {
      grad_w = product_gradient(w, product.t(), rows_of(latent).narrow(1, 0, d_latent));
    }
    if (ctx->needs_input_grad(1)) {
      grad_latent = metered("latent gradient", at::empty(latent.sizes(), latent.options()));
      gemm(product, w, rows_of(grad_latent).narrow(1, 0, d_latent));
      const Tensor over_heads = grad_k.narrow(3, d_nope, d_rope).to(compute_dtype(w.scalar_type())).sum({2});
      grad_latent.narrow(2, d_latent, d_rope).copy_(over_heads);
    }
    return {grad_w, grad_latent, {}, {}};
  }
};

// Some heads' rows of a weight with `rows` a head. The weight itself where all are wanted: the gradient of a part is
// written into zeros of the whole.
Tensor rows_of_heads(const Tensor& w, Range heads, int64_t rows) {
  return heads.size() * rows == w.size(0) ? w : w.narrow(0, heads.begin * rows, heads.size() * rows);
}

Tensor raw_query_latent(const MlaWeights& w, const Tensor& x_BSD) {
  return metered("query latent", parlat::linear(x_BSD, w.w_dq));
}

// q [B, S, h (N+R)], rotated in place, by heads.
Tensor rotated_heads(const MlaWeights& w, const Tensor& q, const RopeTable& rope) {
  const int64_t d_qk = w.dims().d_qk(), n_heads = q.size(2) / d_qk;
  return metered("query", RotateQuery::apply(q, n_heads, rope.cos_BSr, rope.sin_BSr, rope.interleaved))
      .view({q.size(0), q.size(1), n_heads, d_qk});
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_shape(weight, {x.size(-1)}, "norm weight");
  return RmsNorm::apply(x, weight, eps);
}

Tensor project_query(const MlaWeights& w, const Tensor& x_BSD, const RopeTable& rope) {
  check_shape(x_BSD, {kAny, kAny, w.dims().d_model}, "x");
  if (!w.dims().d_q_latent) return up_project_query(w, {0, w.dims().n_heads}, x_BSD, rope);
  check_shape(w.q_norm, {*w.dims().d_q_latent}, "q_norm");
  check_shape(w.w_uq, {w.dims().n_heads * w.dims().d_qk(), *w.dims().d_q_latent}, "w_uq");
  return rotated_heads(w, NormedLinear::apply(raw_query_latent(w, x_BSD), w.q_norm, w.w_uq, w.spec.inner_norm_eps),
                       rope);
}

Tensor project_query_latent(const MlaWeights& w, const Tensor& x_BSD) {
  check_shape(x_BSD, {kAny, kAny, w.dims().d_model}, "x");
  return metered("query latent", rms_norm(raw_query_latent(w, x_BSD), w.q_norm, w.spec.inner_norm_eps));
}

Tensor up_project_query(const MlaWeights& w, Range heads, const Tensor& c_q_BSQ, const RopeTable& rope) {
  const MlaDims& d = w.dims();
  check_shape(w.w_uq, {d.n_heads * d.d_qk(), c_q_BSQ.size(2)}, "w_uq");
  return rotated_heads(w, parlat::linear(c_q_BSQ, rows_of_heads(w.w_uq, heads, d.d_qk())), rope);
}

Tensor project_latent(const MlaWeights& w, const Tensor& x_BSD, const RopeTable& rope) {
  check_shape(x_BSD, {kAny, kAny, w.dims().d_model}, "x");
  check_shape(w.w_dkv, {w.dims().d_cache(), w.dims().d_model}, "w_dkv");
  return FinishLatent::apply(metered("latent", parlat::linear(x_BSD, w.w_dkv)), w.kv_norm, w.spec.inner_norm_eps,
                             rope.cos_BSr, rope.sin_BSr, rope.interleaved);
}

Tensor up_projection(const MlaWeights& w, Range heads) {
  return rows_of_heads(w.w_ukv, heads, w.dims().d_nope + w.dims().d_v);
}

KeysValues up_project(const Tensor& w_ukv_hL, const Tensor& latent_BTd, const MlaDims& dims) {
  check_shape(latent_BTd, {kAny, kAny, dims.d_cache()}, "latent");
  check_shape(w_ukv_hL, {kAny, dims.d_latent}, "w_ukv");
  const variable_list kv = UpProject::apply(w_ukv_hL, latent_BTd, dims.d_nope, dims.d_v);
  return {kv[0], kv[1]};
}

Tensor project_output(const MlaWeights& w, const Tensor& out_BSHV) {
  const MlaDims& d = w.dims();
  check_shape(out_BSHV, {kAny, kAny, d.n_heads, d.d_v}, "out");
  return metered("layer out", parlat::linear(out_BSHV.flatten(2), w.w_o));
}

}  // namespace parlat
