#pragma once

#include "parlat/mla/attention.h"
#include "parlat/mla/projections.h"
#include "parlat/model/attention.h"

namespace parlat {

// One rank, explicit keys and values: what model/ needs of train/ to be tested without it.
class LocalAttention final : public Attention {
 public:
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override {
    const Tensor q_BSHd = project_query(w, x_BSD, tokens.rope);
    const KeysValues kv = up_project(w.w_ukv, project_latent(w, x_BSD, tokens.rope), w.dims());
    return project_output(w, attend_explicit(w.spec, q_BSHd, kv, tokens.visible));
  }
};

inline TokenShard whole_sequences(const ModelConfig& config, int64_t batch, int64_t sequence,
                                  at::ScalarType rope_dtype = at::kFloat) {
  return make_token_shard(config.mla, Documents::whole(batch, sequence), SequenceShards::contiguous(sequence, 1),
                          /*rank=*/0, /*causal=*/true, rope_dtype);
}

}  // namespace parlat
