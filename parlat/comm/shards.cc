#include "parlat/comm/shards.h"

#include <ATen/ATen.h>

namespace parlat {

SequenceShards SequenceShards::contiguous(int64_t sequence, int ranks) {
  SequenceShards shards;
  shards.sequence_ = sequence;
  shards.runs_.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const Range run = even_share(sequence, ranks, rank);
    if (run.size() > 0) shards.runs_[rank].push_back(run);
  }
  return shards;
}

SequenceShards SequenceShards::zigzag(int64_t sequence, int ranks) {
  SequenceShards shards;
  shards.sequence_ = sequence;
  shards.runs_.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int chunk : {rank, 2 * ranks - 1 - rank}) {
      const Range run = even_share(sequence, 2 * ranks, chunk);
      if (run.size() > 0) shards.runs_[rank].push_back(run);
    }
  }
  return shards;
}

int64_t SequenceShards::count(int rank) const {
  int64_t count = 0;
  for (const Range& run : runs_[rank]) count += run.size();
  return count;
}

at::Tensor local_tokens(const at::Tensor& x_BS, const SequenceShards& shards, int rank) {
  std::vector<at::Tensor> runs;
  for (const Range& run : shards.runs(rank)) runs.push_back(x_BS.narrow(1, run.begin, run.size()));
  if (runs.empty()) return x_BS.narrow(1, 0, 0).contiguous();
  return runs.size() == 1 ? runs[0].contiguous() : at::cat(runs, 1);
}

}  // namespace parlat
