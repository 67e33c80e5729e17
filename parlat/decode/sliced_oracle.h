#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parlat/model/attention.h"
#include "parlat/weights/slice_maps.h"

namespace parlat {

// The definition of a sliced layout, slowly: one rank, every slice in turn, plain torch operations in the weights'
// dtype (fp64 for a check). Plugged into the Transformer it gives the logits that all ranks together must give.
class SlicedOracle final : public Attention {
 public:
  // slices: one a layer, in the order in which layers call, each a map set a group. own_heads: group g sees heads
  // even_share(H, G, g) only (gla). What a rank keeps in 16 bits, the rows of its cache and its maps through w_ukv, is
  // rounded to `kept`.
  SlicedOracle(std::vector<std::vector<SliceMaps>> slices, bool own_heads, at::ScalarType kept = at::kDouble)
      : slices_(std::move(slices)), own_heads_(own_heads), kept_(kept) {}

  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  std::vector<std::vector<SliceMaps>> slices_;
  bool own_heads_;
  at::ScalarType kept_;
  mutable size_t next_layer_ = 0;
};

}  // namespace parlat
