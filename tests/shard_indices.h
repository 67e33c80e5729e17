#pragma once

#include <ATen/ATen.h>

#include "parlat/comm/shards.h"

namespace parlat {

// Global index of each token that `rank` holds, increasing: [count] int64.
inline at::Tensor shard_indices(const SequenceShards& shards, int rank) {
  std::vector<int64_t> indices;
  for (const Range& run : shards.runs(rank)) {
    for (int64_t i = run.begin; i < run.end; ++i) indices.push_back(i);
  }
  return at::tensor(indices, at::kLong);
}

}  // namespace parlat
