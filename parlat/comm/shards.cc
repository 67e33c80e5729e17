#include "parlat/comm/shards.h"

#include <ATen/ATen.h>

#include <algorithm>

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

int64_t SequenceShards::count_before(int rank, int64_t index) const {
  int64_t count = 0;
  for (const Range& run : runs_[rank]) count += std::clamp(index, run.begin, run.end) - run.begin;
  return count;
}

SequenceShards SequenceShards::grouped(int size) const {
  SequenceShards groups;
  groups.sequence_ = sequence_;
  groups.runs_.resize(runs_.size() / size);
  for (size_t rank = 0; rank < runs_.size(); ++rank) {
    std::vector<Range>& runs = groups.runs_[rank / size];
    runs.insert(runs.end(), runs_[rank].begin(), runs_[rank].end());
  }
  for (std::vector<Range>& runs : groups.runs_) {
    std::sort(runs.begin(), runs.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  }
  return groups;
}

SequenceShards SequenceShards::within_group(int size, int group) const {
  const SequenceShards groups = grouped(size);
  SequenceShards shards;
  shards.sequence_ = groups.count(group);
  for (int rank = group * size; rank < (group + 1) * size; ++rank) {
    std::vector<Range>& runs = shards.runs_.emplace_back();
    for (const Range& run : runs_[rank]) {
      const int64_t begin = groups.count_before(group, run.begin), end = begin + run.size();
      if (!runs.empty() && runs.back().end == begin) {
        runs.back().end = end;  // what lies between the two is another group's
      } else {
        runs.push_back({begin, end});
      }
    }
  }
  return shards;
}

at::Tensor local_tokens(const at::Tensor& x_BS, const SequenceShards& shards, int rank) {
  std::vector<at::Tensor> runs;
  for (const Range& run : shards.runs(rank)) runs.push_back(x_BS.narrow(1, run.begin, run.size()));
  if (runs.empty()) return x_BS.narrow(1, 0, 0).contiguous();
  return runs.size() == 1 ? runs[0].contiguous() : at::cat(runs, 1);
}

}  // namespace parlat
