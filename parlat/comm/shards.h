#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "parlat/base/range.h"

namespace parlat {

// Which tokens of a sequence each rank holds, as runs of consecutive global indices in increasing order. A rank's local
// order is its runs one after the other. Ranks may be empty.
class SequenceShards {
 public:
  // Rank r holds the r-th of P even shares.
  static SequenceShards contiguous(int64_t sequence, int ranks);
  // Of 2P even shares rank r holds r and 2P-1-r: under a causal mask every rank has the same work.
  static SequenceShards zigzag(int64_t sequence, int ranks);

  int64_t sequence() const { return sequence_; }
  int ranks() const { return static_cast<int>(runs_.size()); }
  const std::vector<Range>& runs(int rank) const { return runs_[rank]; }
  int64_t count(int rank) const;
  // How many of a rank's tokens come before a global index.
  int64_t count_before(int rank, int64_t index) const;

  // Groups of `size` consecutive ranks, each taken as one rank with the tokens of all.
  SequenceShards grouped(int size) const;
  // Who of the ranks of group `group` holds which of its tokens, numbered from 0 in global order: the group's own view.
  SequenceShards within_group(int size, int group) const;

 private:
  int64_t sequence_ = 0;
  std::vector<std::vector<Range>> runs_;
};

// Rank `rank`'s tokens of x [B, S, ...] in its local order: [B, S_local, ...], contiguous; a view where that is
// possible.
at::Tensor local_tokens(const at::Tensor& x_BS, const SequenceShards& shards, int rank);

// Rank r of P computes heads even_share(n_heads, P, r): sizes may differ by one; P <= n_heads is checked by the forms.
class HeadShards {
 public:
  HeadShards(int64_t n_heads, int ranks) : n_heads_(n_heads), ranks_(ranks) {}
  int64_t n_heads() const { return n_heads_; }
  Range range(int rank) const { return even_share(n_heads_, ranks_, rank); }

 private:
  int64_t n_heads_;
  int ranks_;
};

}  // namespace parlat
