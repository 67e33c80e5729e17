#pragma once

#include <cstdint>

#include "parlat/comm/communicator.h"
#include "parlat/decode/model_shard.h"
#include "parlat/tensor/compare.h"

namespace parlat {

// A layout of a model on the ranks at hand.
struct LayoutCase {
  ModelSource source;
  ModelConfig model;  // may be cut to the source's first layers: the others are then skipped
  LayoutSpec layout;
  at::ScalarType dtype = at::kFloat, cache_dtype = at::kFloat;
  int64_t tokens = 70;  // more than a page
};

// What a layout of a model is held to: the logits of the case's seeded tokens in fp64, from the same weights; every
// token goes to all experts.
struct LayoutDefinition {
  Tensor logits_SV;
  Tolerance tolerance{};
};

// In this process alone: ranks that waited for it would wait for longer than an exchange may take. Throws what
// load_weights and load_slices throw.
//   cost  the whole model in fp64, and two passes of it
LayoutDefinition define_layout(const LayoutCase& layout_case);

struct LayoutCheck {
  double max_error = 0, tolerance = 0;  // relative: of the largest logit, and of the RMS of every token's (compare.h)
  bool ok = false;
};

// Collective. The logits of the tokens, decoded over the ranks through the layout, against its definition. Two
// sequences share the passes, all of the tokens and their first half: most of both in one pass, the last few a step at
// a time. Throws what load_model_shard and Decoder throw.
LayoutCheck check_layout(const LayoutCase& layout_case, const LayoutDefinition& definition, Communicator& comm);

// The same of a rank's shard of that case, as it is.
LayoutCheck check_shard(ModelShard shard, const LayoutCase& layout_case, const LayoutDefinition& definition,
                        Communicator& comm);

}  // namespace parlat
