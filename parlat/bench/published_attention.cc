#include "parlat/bench/published_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/base/error.h"
#include "parlat/comm/differentiable.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/mla/projections.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// x and, once it exists, its gradient, for the memory meter.
Tensor traced(const std::string& site, const Tensor& x) {
  if (x.requires_grad()) x.register_hook([site](const Tensor& grad) { metered(site + " gradient", grad); });
  return metered(site, x);
}

// What a fused kernel allocates, [B, S, h, d] each, bias [B, h, S, S] or none; shapes only.
struct FusedShapes : Function<FusedShapes> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::optional<Tensor>& bias) {
    const std::vector<int64_t> rows = {q.size(0), q.size(1), q.size(2)};
    const Tensor out = at::empty({rows[0], rows[1], rows[2], v.size(3)}, q.options());
    ctx->save_for_backward(
        {q, k, v, bias.value_or(Tensor()), out, metered("lse", at::empty(rows, q.options().dtype(at::kFloat)))});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    refuse_second_gradients("shapes of fused attention");
    const variable_list saved = ctx->get_saved_variables();
    variable_list gradients;
    for (int i = 0; i < 4; ++i) gradients.push_back(saved[i].defined() ? at::empty_like(saved[i]) : Tensor());
    return gradients;
  }
};

// q [B, S, h, d], k [B, S, h, d], v [B, S, h, v] -> [B, S, h, v].
Tensor attend_with_keys(AttentionKernel kernel, const Tensor& q, const KeysValues& kv, double scale) {
  traced("key", kv.k_BTHd);
  traced("value", kv.v_BTHV);
  if (kernel == AttentionKernel::kFused) return FusedShapes::apply(q, kv.k_BTHd, kv.v_BTHV, std::optional<Tensor>());
  const Tensor scores = traced("scores", at::matmul(q.transpose(1, 2), kv.k_BTHd.permute({0, 2, 3, 1})) * scale);
  const Tensor p = traced("probabilities", at::softmax(scores, -1));
  return at::matmul(p, kv.v_BTHV.transpose(1, 2)).transpose(1, 2);
}

// q [B, S, h, N+R], latent [B, S, L+R], w_ukv [h (N+V), L] -> [B, S, h, V].
Tensor attend_with_latents(AttentionKernel kernel, const MlaSpec& spec, const Tensor& q, const Tensor& latent,
                           const Tensor& w_ukv) {
  const MlaDims& d = spec.dims;
  const int64_t n_heads = q.size(2);
  const double scale = spec.softmax_scale();
  const Tensor w = w_ukv.view({n_heads, d.d_nope + d.d_v, d.d_latent});
  const Tensor w_uk = w.narrow(1, 0, d.d_nope), w_uv = w.narrow(1, d.d_nope, d.d_v);
  const Tensor q_nope = q.narrow(3, 0, d.d_nope).transpose(1, 2),
               q_rope = q.narrow(3, d.d_nope, d.d_rope).transpose(1, 2);
  const Tensor c_kv = latent.narrow(2, 0, d.d_latent).unsqueeze(1);              // [B, 1, S, L]
  const Tensor k_rope = latent.narrow(2, d.d_latent, d.d_rope).unsqueeze(1);     // [B, 1, S, R]
  const Tensor q_absorbed = traced("absorbed query", at::matmul(q_nope, w_uk));  // [B, h, S, L]
  const Tensor rope_scores = traced("rope scores", at::matmul(q_rope, k_rope.transpose(2, 3)));

  const auto repeated = [&] {
    return traced("repeated latents", c_kv.expand({-1, n_heads, -1, -1}).contiguous());  // [B, h, S, L]
  };
  const Tensor k = repeated(), v = repeated();

  Tensor out_latent;  // [B, h, S, L]
  if (kernel == AttentionKernel::kFused) {
    const Tensor q_BShL = q_absorbed.transpose(1, 2).contiguous();
    out_latent = FusedShapes::apply(q_BShL, k.transpose(1, 2), v.transpose(1, 2), std::optional(rope_scores));
    out_latent = out_latent.transpose(1, 2);
  } else {
    const Tensor latent_scores = traced("latent scores", at::matmul(q_absorbed, k.transpose(2, 3)));
    const Tensor scores = traced("scores", (latent_scores + rope_scores) * scale);
    const Tensor p = traced("probabilities", at::softmax(scores, -1));
    out_latent = at::matmul(p, v);
  }
  return at::matmul(traced("absorbed out", out_latent), w_uv.transpose(1, 2)).transpose(1, 2);
}

// As project_query, but the normalised query latent is saved.
Tensor local_query(const MlaWeights& w, const Tensor& x_BSD, const RopeTable& rope) {
  const Tensor c_q = w.dims().d_q_latent ? project_query_latent(w, x_BSD) : x_BSD;
  return up_project_query(w, {0, w.dims().n_heads}, c_q, rope);
}

}  // namespace

PublishedAttention::PublishedAttention(TrainForm form, Communicator& comm, const MlaDims& dims,
                                       AttentionOptions options)
    : form_(form), comm_(comm), kernel_(options.kernel) {
  validate_published_form(form);
  validate_head_split(form, comm.size(), dims.n_heads);
}

Tensor PublishedAttention::attend(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens,
                                  const Tensor& q_BSHd) const {
  const HeadShards heads(w.dims().n_heads, comm_.size());
  const Tensor latent_local = project_latent(w, x_BSD, tokens.rope);
  if (form_ == TrainForm::kExplicit) {
    KeysValues kv = up_project(w.w_ukv, latent_local, w.dims());
    kv.k_BTHd = scatter_heads_gather_sequence(kv.k_BTHd, heads, tokens.shards, comm_, "published key");
    kv.v_BTHV = scatter_heads_gather_sequence(kv.v_BTHV, heads, tokens.shards, comm_, "published value");
    return attend_with_keys(kernel_, q_BSHd, kv, w.spec.softmax_scale());
  }
  const Tensor latent = gather_sequence_async(latent_local, tokens.shards, comm_, "published latent").wait();
  const Tensor w_ukv = up_projection(w, heads.range(comm_.rank()));
  if (form_ == TrainForm::kLaga) {
    return attend_with_keys(kernel_, q_BSHd, up_project(w_ukv, latent, w.dims()), w.spec.softmax_scale());
  }
  return attend_with_latents(kernel_, w.spec, q_BSHd, latent, w_ukv);
}

Tensor PublishedAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), w.dims().d_model}, "x");
  const HeadShards heads(w.dims().n_heads, comm_.size());
  const Tensor q_BSHd =
      scatter_heads_gather_sequence(local_query(w, x_BSD, tokens.rope), heads, tokens.shards, comm_, "published query");
  const Tensor out_BSHV = traced("out", attend(w, x_BSD, tokens, q_BSHd).contiguous());
  return project_output(w, scatter_sequence_gather_heads(out_BSHV, heads, tokens.shards, comm_, "published out"));
}

void validate_published_form(TrainForm form) {
  if (form != TrainForm::kExplicit && form != TrainForm::kAbsorbed && form != TrainForm::kLaga) {
    throw ConfigError("as-published: expected the forms explicit, absorbed or laga, got {}", name(form));
  }
}

}  // namespace parlat
