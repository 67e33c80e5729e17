#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/comm/shards.h"
#include "parlat/config/parallel.h"
#include "parlat/mla/documents.h"
#include "parlat/mla/rope.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// Which tokens each of `ranks` ranks holds.
SequenceShards shard_sequence(Sharding sharding, int64_t sequence, int ranks);

// What one rank knows of a batch whose sequence is split: who holds which tokens, the rotations of its own, and who may
// see whom.
struct TokenShard {
  SequenceShards shards;
  int rank = 0;
  RopeTable rope;       // of the local tokens
  KeyRanges visible;    // [B, S] x S, global indices
  Tensor positions_BS;  // of all tokens, int64
  int64_t batch() const { return visible.batch(); }
  int64_t sequence() const { return shards.sequence(); }
  int64_t local_count() const { return shards.count(rank); }
};

TokenShard make_token_shard(const MlaSpec& spec, const Documents& documents, SequenceShards shards, int rank,
                            bool causal = true, at::ScalarType rope_dtype = at::kFloat);

// One way to compute MLA over ranks. Called by every rank of the group with its tokens of the same batch.
class Attention {
 public:
  virtual ~Attention() = default;
  // x_BSD: this rank's tokens [B, S_local, D]. Returns [B, S_local, D].
  virtual Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const = 0;
};

}  // namespace parlat
