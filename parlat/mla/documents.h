#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "parlat/kernels/key_ranges.h"

namespace parlat {

// How each sequence of a batch is packed with documents: positions restart at each document's start and attention stays
// within a document.
class Documents {
 public:
  // One document a sequence.
  static Documents whole(int64_t batch, int64_t sequence);
  // lengths[b]: the documents of sequence b in order, adding up to the sequence. Throws ConfigError otherwise.
  static Documents packed(int64_t sequence, const std::vector<std::vector<int64_t>>& lengths);

  int64_t batch() const { return static_cast<int64_t>(bounds_.size()); }
  int64_t sequence() const { return sequence_; }
  // [B, S] int64: the token's index within its document.
  at::Tensor positions() const;
  // The keys each query sees: its document up to itself, or all of its document.
  KeyRanges visible(bool causal) const;

 private:
  Documents(int64_t sequence, std::vector<std::vector<Range>> bounds)
      : sequence_(sequence), bounds_(std::move(bounds)) {}
  int64_t sequence_;
  std::vector<std::vector<Range>> bounds_;
};

}  // namespace parlat
