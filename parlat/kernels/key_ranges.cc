#include "parlat/kernels/key_ranges.h"

#include "parlat/base/error.h"

namespace parlat {

KeyRanges::KeyRanges(int64_t batch, int64_t n_queries, int64_t n_keys, std::vector<Range> rows)
    : batch_(batch), n_queries_(n_queries), n_keys_(n_keys), rows_(std::move(rows)) {
  PARLAT_ASSERT(static_cast<int64_t>(rows_.size()) == batch * n_queries, "{} rows for {} x {} queries", rows_.size(),
                batch, n_queries);
  for (const Range& row : rows_) {
    PARLAT_ASSERT(0 <= row.begin && row.begin <= row.end && row.end <= n_keys, "[{}, {}) of {} keys", row.begin,
                  row.end, n_keys);
  }
}

Range KeyRanges::hull(int64_t b, Range queries) const {
  Range hull{n_keys_, 0};
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    const Range& keys = row(b, query);
    if (keys.size() == 0) continue;
    hull.begin = std::min(hull.begin, keys.begin);
    hull.end = std::max(hull.end, keys.end);
  }
  return hull.begin < hull.end ? hull : Range{0, 0};
}

}  // namespace parlat
