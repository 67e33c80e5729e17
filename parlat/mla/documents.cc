#include "parlat/mla/documents.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "parlat/base/error.h"

namespace parlat {

Documents Documents::whole(int64_t batch, int64_t sequence) {
  return {sequence, std::vector<std::vector<Range>>(batch, {{0, sequence}})};
}

Documents Documents::packed(int64_t sequence, const std::vector<std::vector<int64_t>>& lengths) {
  std::vector<std::vector<Range>> bounds(lengths.size());
  for (size_t b = 0; b < lengths.size(); ++b) {
    int64_t begin = 0;
    for (const int64_t length : lengths[b]) {
      if (length < 1) throw ConfigError("documents of sequence {}: expected lengths of at least 1, got {}", b, length);
      bounds[b].push_back({begin, begin + length});
      begin += length;
    }
    if (begin != sequence) {
      throw ConfigError("documents of sequence {}: expected lengths that add up to {}, got {}", b, sequence, begin);
    }
  }
  return {sequence, std::move(bounds)};
}

at::Tensor Documents::positions() const {
  at::Tensor positions_BS = at::empty({batch(), sequence_}, at::kLong);
  int64_t* position = positions_BS.mutable_data_ptr<int64_t>();
  for (const std::vector<Range>& documents : bounds_) {
    for (const Range& document : documents) {
      std::iota(position, position + document.size(), 0);
      position += document.size();
    }
  }
  return positions_BS;
}

KeyRanges Documents::visible(bool causal) const {
  std::vector<Range> rows;
  rows.reserve(batch() * sequence_);
  for (const std::vector<Range>& documents : bounds_) {
    for (const Range& document : documents) {
      for (int64_t query = document.begin; query < document.end; ++query) {
        rows.push_back({document.begin, causal ? query + 1 : document.end});
      }
    }
  }
  return {batch(), sequence_, sequence_, std::move(rows)};
}

}  // namespace parlat
