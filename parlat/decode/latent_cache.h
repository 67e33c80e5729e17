#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "parlat/kernels/decode_attention.h"

namespace parlat {

// One rank's latents of all sequences and layers, in pages of kPageTokens rows that sequences take and give back. Row:
// the rank's slice of c_kv, then the rotated k_rope. Layers share the page lists. Slots number the sequences.
class LatentCache {
 public:
  struct Shape {
    int64_t n_layers = 0, n_pages = 0;
    std::vector<int64_t> widths;  // a layer's: w + R
    at::ScalarType dtype = at::kFloat;
  };
  // Memory is taken at once, but touched (and so committed) only as rows are written. Throws ConfigError where the
  // system refuses it.
  explicit LatentCache(const Shape& shape);

  static int64_t pages_for(int64_t rows) { return (rows + kPageTokens - 1) / kPageTokens; }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t pages() const { return n_pages_; }
  // Bytes that one more row takes, over all layers: of the tensors that exist.
  int64_t bytes_per_row() const;

  // A slot with room for `rows` rows. Throws ConfigError, saying how many pages are free, where there is none.
  int64_t add(int64_t rows);
  void release(int64_t slot);

  // Writes rows [n, w + R] of a layer: row i is row `places[i].row` of slot `places[i].slot`.
  struct Place {
    int64_t slot, row;
  };
  void write(int64_t layer, const Tensor& rows_nd, const std::vector<Place>& places);
  // For one query a row: the first lengths[i] rows of slots[i].
  PagedLatents view(int64_t layer, const std::vector<int64_t>& slots, std::vector<int64_t> lengths) const;

  // Every row that no sequence holds becomes NaN (tests), or seeded normal numbers (benchmarks).
  void poison();
  void fill_random(uint64_t seed);

 private:
  int64_t n_pages_;
  std::vector<Tensor> layers_;  // [n_pages * kPageTokens, w + R]
  std::vector<int32_t> free_;
  struct Slot {
    bool used = false;
    std::vector<int32_t> pages;
  };
  std::vector<Slot> slots_;
};

}  // namespace parlat
