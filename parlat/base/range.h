#pragma once

#include <algorithm>
#include <cstdint>

namespace parlat {

// Half-open [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool contains(int64_t index) const { return begin <= index && index < end; }
  bool operator==(const Range&) const = default;
};

// Part `index` of 0..count cut in `parts` contiguous parts whose sizes differ by at most one, larger parts first.
// Parts beyond count are empty.
inline Range even_share(int64_t count, int64_t parts, int64_t index) {
  const int64_t base = count / parts, extra = count % parts;
  const int64_t begin = index * base + std::min(index, extra);
  return {begin, begin + base + (index < extra ? 1 : 0)};
}

}  // namespace parlat
