#include "parlat/comm/shards.h"

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

std::vector<int64_t> SequenceShards::indices(int rank) const {
  std::vector<int64_t> indices;
  indices.reserve(count(rank));
  for (const Range& run : runs_[rank]) {
    for (int64_t i = run.begin; i < run.end; ++i) indices.push_back(i);
  }
  return indices;
}

}  // namespace parlat
