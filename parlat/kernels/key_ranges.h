#pragma once

#include <cstdint>
#include <vector>

#include "parlat/base/range.h"

namespace parlat {

// The keys each query may see: one interval of key indices a query, which covers causal attention, packed documents and
// both together. Row b * n_queries + s is query s of sequence b. An empty interval: out 0.
class KeyRanges {
 public:
  KeyRanges(int64_t batch, int64_t n_queries, int64_t n_keys, std::vector<Range> rows);
  int64_t batch() const { return batch_; }
  int64_t n_queries() const { return n_queries_; }
  int64_t n_keys() const { return n_keys_; }
  const Range& row(int64_t b, int64_t query) const { return rows_[b * n_queries_ + query]; }
  // The smallest interval that holds the rows of all queries in `queries`: what a block may skip lies outside.
  Range hull(int64_t b, Range queries) const;

 private:
  int64_t batch_, n_queries_, n_keys_;
  std::vector<Range> rows_;
};

}  // namespace parlat
