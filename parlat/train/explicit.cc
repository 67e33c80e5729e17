#include "parlat/train/explicit.h"

#include "parlat/comm/differentiable.h"
#include "parlat/mla/attention.h"
#include "parlat/mla/projections.h"

namespace parlat {

Tensor ExplicitAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  const MlaDims& d = w.dims();
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), d.d_model}, "x");
  const HeadShards heads(d.n_heads, comm_.size());
  const auto scatter_heads = [&](const Tensor& x_local_BSHd, const char* what) {
    return scatter_heads_gather_sequence(x_local_BSHd, heads, tokens.shards, comm_, what);
  };

  const Tensor q_BSHd = scatter_heads(project_query(w, x_BSD, tokens.rope), "explicit query");
  KeysValues kv = up_project(w.w_ukv, project_latent(w, x_BSD, tokens.rope), d);
  kv.k_BTHd = scatter_heads(kv.k_BTHd, "explicit key");
  kv.v_BTHV = scatter_heads(kv.v_BTHV, "explicit value");

  const Tensor out_BSHV = attend_explicit(w.spec, q_BSHd, kv, tokens.visible, options_.kernel);

  return project_output(w, scatter_sequence_gather_heads(out_BSHV, heads, tokens.shards, comm_, "explicit out"));
}

}  // namespace parlat
