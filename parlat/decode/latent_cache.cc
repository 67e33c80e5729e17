#include "parlat/decode/latent_cache.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <limits>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"

namespace parlat {

LatentCache::LatentCache(const Shape& shape) : n_pages_(shape.n_pages) {
  PARLAT_ASSERT(static_cast<int64_t>(shape.widths.size()) == shape.n_layers, "{} widths", shape.widths.size());
  for (const int64_t width : shape.widths) {
    try {
      layers_.push_back(at::empty({shape.n_pages * kPageTokens, width}, shape.dtype));
    } catch (const c10::Error&) {
      throw ConfigError("latent cache: expected memory for {} rows of {} in {} layers, got none for layer {}",
                        shape.n_pages * kPageTokens, width, shape.n_layers, layers_.size());
    }
  }
  for (int64_t page = shape.n_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

int64_t LatentCache::bytes_per_row() const {
  int64_t bytes = 0;
  for (const Tensor& layer : layers_) bytes += layer.size(1) * layer.element_size();
  return bytes;
}

int64_t LatentCache::add(int64_t rows) {
  const int64_t needed = pages_for(rows);
  if (needed > free_pages()) {
    throw ConfigError("latent cache: expected {} free pages of {} tokens for a sequence, got {} of {}", needed,
                      kPageTokens, free_pages(), n_pages_);
  }
  size_t slot = 0;
  while (slot < slots_.size() && slots_[slot].used) ++slot;
  if (slot == slots_.size()) slots_.emplace_back();
  slots_[slot].used = true;  // a sequence of which no token lies here has a slot without pages
  for (int64_t i = 0; i < needed; ++i) {
    slots_[slot].pages.push_back(free_.back());
    free_.pop_back();
  }
  return static_cast<int64_t>(slot);
}

void LatentCache::release(int64_t slot) {
  Slot& given = slots_.at(slot);
  free_.insert(free_.end(), given.pages.rbegin(), given.pages.rend());
  given = Slot();
}

void LatentCache::write(int64_t layer, const Tensor& rows_nd, const std::vector<Place>& places) {
  if (places.empty()) return;
  const Tensor& stored = layers_[layer];
  check_shape(rows_nd, {static_cast<int64_t>(places.size()), stored.size(1)}, "rows");
  const Tensor rows = rows_nd.to(stored.scalar_type()).contiguous();
  const int64_t bytes = stored.size(1) * stored.element_size();
  const auto* from = static_cast<const std::byte*>(rows.const_data_ptr());
  auto* const to = static_cast<std::byte*>(stored.mutable_data_ptr());
  for (const auto& [slot, row] : places) {
    PARLAT_ASSERT(row / kPageTokens < static_cast<int64_t>(slots_[slot].pages.size()), "row {} of slot {}", row, slot);
    const int64_t index = slots_[slot].pages[row / kPageTokens] * kPageTokens + row % kPageTokens;
    std::memcpy(to + index * bytes, from, bytes);
    from += bytes;
  }
}

PagedLatents LatentCache::view(int64_t layer, const std::vector<int64_t>& slots, std::vector<int64_t> lengths) const {
  PagedLatents latents{.rows_nd = layers_[layer], .pages = {}, .lengths = std::move(lengths)};
  for (const int64_t slot : slots) latents.pages.emplace_back(slots_[slot].pages);
  return latents;
}

void LatentCache::poison() {
  for (const Tensor& layer : layers_) {
    for (const int32_t page : free_) {
      layer.narrow(0, page * kPageTokens, kPageTokens).fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
}

void LatentCache::fill_random(uint64_t seed) {
  // Every page its own window of two pages of numbers, for the time of a copy: a page in another's place, or another
  // layer's, must show.
  constexpr int64_t kStride = 7919;  // a prime: as many windows as a page has elements
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Tensor& layer = layers_[i];
    const int64_t width = layer.size(1), size = kPageTokens * width;
    const Tensor numbers = seeded_normal({2 * size}, 1.0, seed, fmt::format("latents {}", i), layer.scalar_type());
    for (const int32_t page : free_) {
      const Tensor window = numbers.narrow(0, page * kStride % size, size);
      layer.narrow(0, page * kPageTokens, kPageTokens).copy_(window.view({kPageTokens, width}));
    }
  }
}

}  // namespace parlat
