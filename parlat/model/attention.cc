#include "parlat/model/attention.h"

#include "parlat/base/error.h"

namespace parlat {

SequenceShards shard_sequence(Sharding sharding, int64_t sequence, int ranks) {
  return sharding == Sharding::kZigzag ? SequenceShards::zigzag(sequence, ranks)
                                       : SequenceShards::contiguous(sequence, ranks);
}

TokenShard make_token_shard(const MlaSpec& spec, const Documents& documents, SequenceShards shards, int rank,
                            bool causal, at::ScalarType rope_dtype) {
  if (documents.sequence() != shards.sequence()) {
    throw ConfigError("token shard: documents of {} tokens, shards of {}", documents.sequence(), shards.sequence());
  }
  const Tensor positions_BS = documents.positions();
  RopeTable rope = rope_table(spec.rope, spec.dims.d_rope, local_tokens(positions_BS, shards, rank), rope_dtype);
  return {std::move(shards), rank, std::move(rope), documents.visible(causal), positions_BS};
}

}  // namespace parlat
