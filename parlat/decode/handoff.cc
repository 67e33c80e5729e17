#include "parlat/decode/handoff.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/kernels/few_rows.h"

namespace parlat {

namespace {

// Rows of a chunk that lie on a rank: of its own, in the order in which it stores them.
Range kept_rows(const Placement& p, Range chunk) { return {p.local_count(chunk.begin), p.local_count(chunk.end)}; }

// Everything of a chunk that one decoding rank keeps, layer after layer, as one row of numbers.
int64_t kept_size(const HandoffPlan& plan, int d, Range chunk) {
  const Placement& p = plan.decoders[d];
  int64_t columns = 0;
  for (size_t layer = 0; layer < plan.stores.size(); ++layer) {
    columns += plan.width(static_cast<int64_t>(layer), p.group) + plan.dims.d_rope;
  }
  return kept_rows(p, chunk).size() * columns;
}

// latents [T, L + R] of each layer: those of the chunk and all before it.
Tensor kept(const HandoffPlan& plan, int d, const std::vector<Tensor>& latents, Range chunk) {
  const Placement& p = plan.decoders[d];
  const Range own = kept_rows(p, chunk);
  std::vector<Tensor> layers;
  for (size_t layer = 0; layer < latents.size(); ++layer) {
    Tensor rows = latents[layer];
    if (p.tokens_split) rows = rows.slice(0, p.member, std::nullopt, p.members);
    rows = rows.narrow(0, own.begin, own.size());
    const Tensor& store_wL = plan.stores[layer][p.group];
    const Tensor c_kv = rows.narrow(1, 0, plan.dims.d_latent),
                 k_rope = rows.narrow(1, plan.dims.d_latent, plan.dims.d_rope);
    const Tensor z = store_wL.defined() ? project_rows(c_kv.contiguous(), store_wL) : c_kv;
    layers.push_back(at::cat({z, k_rope}, 1).flatten());
  }
  return at::cat(layers);
}

// logits_V: undefined before the last chunk.
void exchange(const HandoffPlan& plan, const std::vector<Tensor>& send, const std::vector<Tensor>& receive,
              const Tensor& logits_V, Communicator& world) {
  PARLAT_ASSERT(world.size() == plan.prefill_ranks + plan.decode_ranks(), "{} ranks", world.size());
  world.all_to_all(send, receive, "prompt latents").wait();
  if (logits_V.defined()) world.broadcast(logits_V, /*root=*/0, "prompt logits").wait();
}

std::vector<Tensor> nothing(int ranks) { return std::vector<Tensor>(ranks, at::empty({0}, at::kFloat)); }

}  // namespace

HandoffPlan make_handoff_plan(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                              int prefill_ranks, int world_ranks) {
  const int decode_ranks = world_ranks - prefill_ranks;
  if (prefill_ranks < 1 || decode_ranks < 1) {
    throw ConfigError("prefill-ranks: expected at least one of the {} rank{} and one left to decode, got {}",
                      world_ranks, world_ranks > 1 ? "s" : "", prefill_ranks);
  }
  HandoffPlan plan{.prefill_ranks = prefill_ranks,
                   .decoders = {},
                   .stores = std::vector<std::vector<Tensor>>(config.n_layers),
                   .dims = config.mla.dims,
                   .vocab_size = config.vocab_size};
  for (int d = 0; d < decode_ranks; ++d) plan.decoders.push_back(place(layout, config.mla.dims, decode_ranks, d));
  for (int64_t group = 0; group < layout.groups; ++group) {
    const std::vector<SliceMaps> maps = slice_maps(source, config, layout, group);
    for (int64_t layer = 0; layer < config.n_layers; ++layer) {
      const Tensor& store_Lw = maps[layer].store_Lw;
      plan.stores[layer].push_back(store_Lw.defined() ? store_Lw.t().contiguous() : Tensor());
    }
  }
  return plan;
}

void serve_prompt(const HandoffPlan& plan, Decoder& decoder, const std::vector<int64_t>& prompt, int64_t chunk_tokens,
                  Communicator& world) {
  const auto length = static_cast<int64_t>(prompt.size());
  Decoder::Prefill state{.slot = decoder.add_sequence(length), .done = 0, .latents = {}};
  while (state.done < length) {
    const Range chunk{state.done, std::min(state.done + chunk_tokens, length)};
    const Tensor hidden_nD = decoder.prefill(state, {prompt.begin() + chunk.begin, prompt.begin() + chunk.end});
    std::vector<Tensor> send = nothing(world.size());
    for (int d = 0; d < plan.decode_ranks(); ++d) {
      if (plan.source_of(d) == world.rank()) send[plan.prefill_ranks + d] = kept(plan, d, state.latents, chunk);
    }
    Tensor logits_V;
    if (chunk.end == length) logits_V = decoder.logits(hidden_nD.narrow(0, hidden_nD.size(0) - 1, 1))[0].contiguous();
    exchange(plan, send, nothing(world.size()), logits_V, world);
  }
  decoder.release(state.slot);
}

Tensor take_over(const HandoffPlan& plan, Decoder& decoder, int64_t slot, Range chunk, bool last, Communicator& world) {
  const int d = world.rank() - plan.prefill_ranks;
  std::vector<Tensor> receive = nothing(world.size());
  const Tensor all = at::empty({kept_size(plan, d, chunk)}, at::kFloat),
               logits_V = last ? at::empty({plan.vocab_size}, at::kFloat) : Tensor();
  receive[plan.source_of(d)] = all;
  exchange(plan, nothing(world.size()), receive, logits_V, world);

  const Placement& p = plan.decoders[d];
  const Range own = kept_rows(p, chunk);
  int64_t at = 0;
  for (size_t layer = 0; layer < plan.stores.size(); ++layer) {
    const int64_t width = plan.width(static_cast<int64_t>(layer), p.group) + plan.dims.d_rope;
    decoder.import_rows(slot, static_cast<int64_t>(layer), own.begin,
                        all.narrow(0, at, own.size() * width).view({own.size(), width}));
    at += own.size() * width;
  }
  return logits_V;
}

}  // namespace parlat
