#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>

#include "parlat/tensor/shape.h"

namespace parlat {

// Matrix products whose sums run in a drawn order, as on hardware that reduces a product's parts in the order in which
// they are finished: the depth K is cut in up to kParts even parts, whose products are added to the result one after
// the other in an order drawn anew for every product. The same sum but for rounding, which is what differs from run to
// run.
//   where   torch's dispatcher: an open scope puts a key in front of addmm.out, through which every product of a
//           forward and a backward pass goes, on this thread alone; outside of scopes nothing is in the way
//   cost    kParts products of a part of the depth each
class ShuffledSums {
 public:
  static constexpr int64_t kParts = 8;  // of fewer than three the order would not matter

  explicit ShuffledSums(uint64_t seed) : random_(seed) {}

  // Products on this thread, and in backward passes that start on it, run in drawn orders. One scope at a time; not for
  // threads that work for this one (one intra-op thread).
  class Scope {
   public:
    explicit Scope(ShuffledSums& sums);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // Runs body and takes its draws back: what is computed next runs in the orders in which body did, to the same bits.
  template <typename Body>
  void ahead(const Body& body) {
    const std::mt19937_64 before = random_;
    body();
    random_ = before;
  }

  // 0 .. parts - 1, permuted.
  std::vector<int64_t> draw(int64_t parts);

 private:
  std::mt19937_64 random_;
};

}  // namespace parlat
