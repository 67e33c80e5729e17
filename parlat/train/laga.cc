#include "parlat/train/laga.h"

#include "parlat/comm/differentiable.h"
#include "parlat/mla/attention.h"
#include "parlat/mla/projections.h"

namespace parlat {

Tensor LagaAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  const MlaDims& d = w.dims();
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), d.d_model}, "x");
  const HeadShards heads(d.n_heads, comm_.size());

  PendingGather latent =
      gather_sequence_async(project_latent(w, x_BSD, tokens.rope), tokens.shards, comm_, "laga latent");
  const Tensor q_BSHd =
      scatter_heads_gather_sequence(project_query(w, x_BSD, tokens.rope), heads, tokens.shards, comm_, "laga query");

  const Tensor out_BSHV = attend_latent(w.spec, q_BSHd, latent.wait(), up_projection(w, heads.range(comm_.rank())),
                                        tokens.visible, options_);

  return project_output(w, scatter_sequence_gather_heads(out_BSHV, heads, tokens.shards, comm_, "laga out"));
}

}  // namespace parlat
