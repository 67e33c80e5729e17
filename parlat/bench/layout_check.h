#pragma once

#include <cstdint>

#include "parlat/comm/communicator.h"
#include "parlat/decode/model_shard.h"

namespace parlat {

struct LayoutCheck {
  double max_error = 0, tolerance = 0;  // relative: of the largest logit, and of the RMS of every token's (compare.h)
  bool ok = false;
};

// Collective. The logits of `tokens` seeded tokens, decoded over the ranks through the layout, most of them in one pass
// and the last few one by one, against the layout's definition in fp64 from the same weights; every token goes to all
// experts. model may be cut to a model's first layers: the others are then skipped. Throws what load_model_shard and
// Decoder throw.
LayoutCheck check_layout(const ModelSource& source, const ModelConfig& model, const LayoutSpec& layout,
                         at::ScalarType dtype, int64_t tokens, Communicator& comm);

}  // namespace parlat
