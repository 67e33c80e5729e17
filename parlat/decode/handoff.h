#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parlat/comm/communicator.h"
#include "parlat/decode/decoder.h"

namespace parlat {

// Prefill/decode separation: the first ranks of a world run prompts exactly, the others decode them, in groups of
// different sizes. A prompt's latents travel once, chunk by chunk as it is run, as what each decoding rank keeps of
// them: its slice of its tokens.
struct HandoffPlan {
  int prefill_ranks = 0;
  std::vector<Placement> decoders;          // of each decoding rank
  std::vector<std::vector<Tensor>> stores;  // [layer][group]: the slice's store map, [w, L]; undefined: whole latents
  MlaDims dims;
  int64_t vocab_size = 0;
  int decode_ranks() const { return static_cast<int>(decoders.size()); }
  // Which prefilling rank serves decoding rank d.
  int source_of(int d) const { return d % prefill_ranks; }
  int64_t width(int64_t layer, int64_t group) const {
    const Tensor& store = stores[layer][group];
    return store.defined() ? store.size(0) : dims.d_latent;
  }
};
// Throws what place, load_slices and load_model_shard throw, ConfigError unless both groups have ranks.
HandoffPlan make_handoff_plan(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                              int prefill_ranks, int world_ranks);

// Collective over the world, prompts and their chunks in the same order everywhere: no rank waits longer than for a
// chunk to be run, or for a step of decoding.
//   sent  by the prefilling ranks together: for each decoding rank its tokens x (w + R) x layers fp32, and the logits
// A prefilling rank: runs a prompt in chunks of so many tokens.
void serve_prompt(const HandoffPlan& plan, Decoder& decoder, const std::vector<int64_t>& prompt, int64_t chunk_tokens,
                  Communicator& world);
// A decoding rank: stores the tokens of one chunk in the slot. Returns the logits [vocabulary] of the prompt's last
// token with its last chunk, an undefined tensor before.
Tensor take_over(const HandoffPlan& plan, Decoder& decoder, int64_t slot, Range chunk, bool last, Communicator& world);

}  // namespace parlat
