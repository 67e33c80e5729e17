#include "parlat/train/laga_q.h"

#include "parlat/comm/differentiable.h"
#include "parlat/mla/attention.h"
#include "parlat/mla/projections.h"

namespace parlat {

Tensor LagaQAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  const MlaDims& d = w.dims();
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), d.d_model}, "x");
  const HeadShards heads(d.n_heads, comm_.size());
  const Range mine = heads.range(comm_.rank());

  PendingGather latent =
      gather_sequence_async(project_latent(w, x_BSD, tokens.rope), tokens.shards, comm_, "laga-q latent");
  PendingGather query_latent =
      gather_sequence_async(project_query_latent(w, x_BSD), tokens.shards, comm_, "laga-q query latent");
  const RopeTable rope = rope_table(w.spec.rope, d.d_rope, tokens.positions_BS, tokens.rope.cos_BSr.scalar_type());
  const Tensor q_BSHd = up_project_query(w, mine, query_latent.wait(), rope);

  const Tensor out_BSHV =
      attend_latent(w.spec, q_BSHd, latent.wait(), up_projection(w, mine), tokens.visible, options_);

  return project_output(w, scatter_sequence_gather_heads(out_BSHV, heads, tokens.shards, comm_, "laga-q out"));
}

}  // namespace parlat
