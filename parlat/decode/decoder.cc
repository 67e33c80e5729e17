#include "parlat/decode/decoder.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <cmath>

#include "parlat/base/error.h"
#include "parlat/decode/attend.h"
#include "parlat/decode/feed_forward.h"
#include "parlat/kernels/few_rows.h"
#include "parlat/kernels/fused_attention.h"
#include "parlat/mla/projections.h"

namespace parlat {

namespace {

Tensor normed(const Tensor& x_nd, const Tensor& weight, double eps) {
  const Tensor out = at::empty(x_nd.sizes(), x_nd.options());
  norm_rows(x_nd, weight, eps, out);
  return out;
}

LatentCache::Shape cache_shape(const ModelShard& shard, const DecoderOptions& options) {
  LatentCache::Shape shape{.n_layers = shard.config.n_layers, .n_pages = 0, .widths = {}, .dtype = options.cache_dtype};
  // Members that split tokens need as many rows together as one would alone.
  shape.n_pages = shard.placement.most_count(LatentCache::pages_for(options.cache_tokens));
  for (const LayerShard& layer : shard.layers) {
    shape.widths.push_back(layer.attention.width + shard.config.mla.dims.d_rope);
  }
  return shape;
}

}  // namespace

// What all layers of one pass share.
struct Decoder::Step {
  RopeTable rope;
  std::vector<LatentCache::Place> places;  // of the rows that lie on this rank
  std::vector<int64_t> local_rows;         // which they are
  Tensor local_n;                          // the same for index_select; undefined: all
  std::vector<int64_t> slots, lengths;     // of each row's query: what it sees here
  Prefill* prefill = nullptr;              // exact

  // The next row of the pass, in order.
  void add(const Placement& p, int64_t slot, int64_t position) {
    if (p.holds(position)) {
      local_rows.push_back(static_cast<int64_t>(slots.size()));
      places.push_back({slot, p.local_index(position)});
    }
    slots.push_back(slot);
    lengths.push_back(p.local_count(position + 1));
  }
};

Decoder::Decoder(ModelShard shard, Communicator& comm, const DecoderOptions& options)
    : shard_(std::move(shard)), comm_(comm), options_(options), cache_(cache_shape(shard_, options)) {
  // Collective, so every layout splits; only some use it.
  members_ = comm.split(static_cast<int>(shard_.placement.group));
  if (!options.slice_norm) return;
  for (size_t i = 0; i < shard_.layers.size(); ++i) {
    if (shard_.layers[i].attention.mla.kv_norm.eq(1).all().item<bool>()) continue;
    throw ConfigError(
        "slice-norm: expected kv_a_layernorm of 1, as convert --transform hadamard or pca leaves it, got "
        "others in layer {} of {}",
        i, shard_.origin);
  }
}

int64_t Decoder::cache_tokens_for(const std::vector<int64_t>& lengths, const Placement& placement) {
  int64_t pages = 0;
  for (const int64_t length : lengths) pages += LatentCache::pages_for(placement.most_count(length));
  return pages * kPageTokens * placement.token_sharers();
}

int64_t Decoder::pages_needed(int64_t tokens) const {
  return LatentCache::pages_for(shard_.placement.most_count(tokens));
}

bool Decoder::has_room(int64_t tokens) const { return pages_needed(tokens) <= cache_.free_pages(); }

bool Decoder::fits(int64_t tokens) const { return pages_needed(tokens) <= cache_.pages(); }

int64_t Decoder::cache_tokens() const { return cache_.pages() * kPageTokens * shard_.placement.token_sharers(); }

double Decoder::cache_bytes_per_token() const {
  return static_cast<double>(cache_.bytes_per_row()) / static_cast<double>(shard_.placement.token_sharers());
}

Tensor Decoder::forward(const std::vector<TokenAt>& rows) {
  Step step;
  std::vector<int64_t> tokens, positions;
  for (const auto& [slot, position, token] : rows) {
    step.add(shard_.placement, slot, position);
    tokens.push_back(token);
    positions.push_back(position);
  }
  return run(tokens, at::tensor(positions, at::kLong), step);
}

Tensor Decoder::prefill(Prefill& state, const std::vector<int64_t>& tokens) {
  const int64_t end = state.done + static_cast<int64_t>(tokens.size());
  state.latents.resize(shard_.layers.size());
  Step step;
  step.prefill = &state;
  for (int64_t position = state.done; position < end; ++position) step.add(shard_.placement, state.slot, position);
  const Tensor hidden_nD = run(tokens, at::arange(state.done, end, at::kLong), step);
  state.done = end;
  return hidden_nD;
}

Tensor Decoder::run(const std::vector<int64_t>& tokens, const Tensor& positions_n, Step& step) {
  const c10::InferenceMode inference;
  const MlaSpec& spec = shard_.config.mla;
  step.rope = rope_table(spec.rope, spec.dims.d_rope, positions_n.unsqueeze(0));
  if (step.local_rows.size() < tokens.size()) step.local_n = at::tensor(step.local_rows, at::kLong);
  return layers(embed(tokens), step);
}

Tensor Decoder::embed(const std::vector<int64_t>& tokens) {
  for (const int64_t token : tokens) {
    if (token < 0 || token >= shard_.config.vocab_size) {
      throw ConfigError("token: expected 0 to {}, got {}", shard_.config.vocab_size - 1, token);
    }
  }
  const Range own = shard_.vocabulary;
  const Tensor x_nD = at::zeros({static_cast<int64_t>(tokens.size()), shard_.config.mla.dims.d_model}, at::kFloat);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (own.contains(tokens[i])) x_nD[i].copy_(shard_.embedding[tokens[i] - own.begin]);
  }
  return sum_over_ranks(x_nD, "decode embedding");
}

Tensor Decoder::layers(Tensor x_nD, const Step& step) {
  for (size_t i = 0; i < shard_.layers.size(); ++i) {
    const LayerShard& layer = shard_.layers[i];
    x_nD.add_(attention(i, normed(x_nD, layer.attention_norm, shard_.config.rms_norm_eps), step));
    x_nD.add_(feed_forward(layer, normed(x_nD, layer.mlp_norm, shard_.config.rms_norm_eps)));
  }
  return normed(x_nD, shard_.final_norm, shard_.config.rms_norm_eps);
}

Tensor Decoder::attention(int64_t layer, const Tensor& x_nD, const Step& step) {
  const AttentionShard& a = shard_.layers[layer].attention;
  const MlaDims& d = a.mla.dims();
  const std::vector<Tensor> down = project_rows(x_nD, {a.mla.w_dkv, d.d_q_latent ? a.mla.w_dq : a.mla.w_uq});
  finish_latent(a, down[0], step.rope);
  store(layer, down[0], step);
  const Tensor q_nhd = query(a, down[1], step.rope);
  const Tensor partial_nD =
      step.prefill ? exact_attention(layer, q_nhd, down[0], step) : sliced_attention(layer, q_nhd, step);
  return sum_over_ranks(partial_nD, "decode attention");
}

// From c_q before its norm, or from what w_uq gave of a model without one.
Tensor Decoder::query(const AttentionShard& a, Tensor projected, const RopeTable& rope) const {
  const MlaDims& d = a.mla.dims();
  if (d.d_q_latent) {
    norm_rows(projected, a.mla.q_norm, a.mla.spec.inner_norm_eps, projected);
    projected = project_rows(projected, a.mla.w_uq);
  }
  const Tensor q_nhd = projected.view({projected.size(0), d.n_heads, d.d_qk()});
  rotate(q_nhd.narrow(2, d.d_nope, d.d_rope).unsqueeze(0), rope, Rotation::kForward);
  return q_nhd;
}

// [n, L + R], in place: normalised c_kv, rotated k_rope; the whole of it, on every rank.
void Decoder::finish_latent(const AttentionShard& a, const Tensor& latent_nd, const RopeTable& rope) const {
  const MlaDims& d = a.mla.dims();
  const Tensor c_kv = latent_nd.narrow(1, 0, d.d_latent);
  norm_rows(c_kv, a.mla.kv_norm, a.mla.spec.inner_norm_eps, c_kv);
  rotate(latent_nd.narrow(1, d.d_latent, d.d_rope).unsqueeze(0).unsqueeze(2), rope, Rotation::kForward);
}

void Decoder::store(int64_t layer, const Tensor& latent_nd, const Step& step) {
  const AttentionShard& a = shard_.layers[layer].attention;
  const MlaDims& d = a.mla.dims();
  Tensor own_nd = step.local_n.defined() ? latent_nd.index_select(0, step.local_n) : latent_nd;
  if (a.store_wL.defined()) {
    const Tensor z_nw = project_rows(own_nd.narrow(1, 0, d.d_latent), a.store_wL);
    own_nd = at::cat({z_nw, own_nd.narrow(1, d.d_latent, d.d_rope)}, 1);
  }
  keep(layer, own_nd, step.places);
}

void Decoder::keep(int64_t layer, Tensor rows_nd, const std::vector<LatentCache::Place>& places) {
  const AttentionShard& a = shard_.layers[layer].attention;
  if (options_.slice_norm && a.store_wL.defined()) {
    // Of the latent divided by its own RMS, without weights: the slice's own RMS takes the place of that one.
    const Tensor z_nw = rows_nd.narrow(1, 0, a.width);
    const Tensor rms_n1 = (z_nw.square().mean(1, /*keepdim=*/true) + a.mla.spec.inner_norm_eps).sqrt();
    rows_nd = at::cat({z_nw / rms_n1, rows_nd.narrow(1, a.width, a.mla.dims().d_rope)}, 1);
  }
  cache_.write(layer, rows_nd, places);
}

void Decoder::import_rows(int64_t slot, int64_t layer, int64_t first, const Tensor& rows_nd) {
  std::vector<LatentCache::Place> places;
  for (int64_t row = 0; row < rows_nd.size(0); ++row) places.push_back({slot, first + row});
  keep(layer, rows_nd, places);
}

Tensor Decoder::sliced_attention(int64_t layer, const Tensor& q_nhd, const Step& step) {
  const AttentionShard& a = shard_.layers[layer].attention;
  const MlaDims& d = a.mla.dims();
  const int64_t n = q_nhd.size(0), n_heads = q_nhd.size(1);
  const Tensor q = at::empty({n, n_heads, a.width + d.d_rope}, at::kFloat);
  project_heads(q_nhd.narrow(2, 0, d.d_nope), a.key_map_hwN, q.narrow(2, 0, a.width));
  q.narrow(2, a.width, d.d_rope).copy_(q_nhd.narrow(2, d.d_nope, d.d_rope));
  q.mul_(a.mla.spec.softmax_scale());
  const PagedLatents seen = cache_.view(layer, step.slots, step.lengths);
  const Tensor out_nhw = shard_.placement.tokens_split
                             ? attend_own_tokens(q, seen, d.d_rope, shard_.config.mla.dims.n_heads, *members_)
                             : attend_all_tokens(q, seen, d.d_rope);
  const Tensor out_nhV = at::empty({n, n_heads, d.d_v}, at::kFloat);
  project_heads(out_nhw, a.value_map_hVw, out_nhV);
  return project_rows(out_nhV.flatten(1), a.mla.w_o);
}

Tensor Decoder::exact_attention(int64_t layer, const Tensor& q_nhd, const Tensor& latent_nd, const Step& step) {
  const AttentionShard& a = shard_.layers[layer].attention;
  const MlaDims& d = a.mla.dims();
  Tensor& past = step.prefill->latents[layer];
  past = past.defined() ? at::cat({past, latent_nd}) : latent_nd;

  const Range all = shard_.placement.heads, own = shard_.placement.prefill_heads;
  const int64_t first = own.begin - all.begin, n = q_nhd.size(0), n_keys = past.size(0);
  if (own.size() == 0) return at::zeros({n, d.d_model}, at::kFloat);
  std::vector<Range> visible;
  for (int64_t i = 0; i < n; ++i) visible.push_back({0, step.prefill->done + i + 1});
  const Tensor out_1nhV =
      fused_latent_attention(q_nhd.narrow(1, first, own.size()).unsqueeze(0), past.unsqueeze(0), a.mla.w_ukv,
                             KeyRanges(1, n, n_keys, visible), a.mla.spec.softmax_scale());
  return project_rows(out_1nhV.flatten(2).squeeze(0), a.mla.w_o.narrow(1, first * d.d_v, own.size() * d.d_v));
}

Tensor Decoder::feed_forward(const LayerShard& layer, const Tensor& x_nD) {
  return sum_over_ranks(partial_feed_forward(shard_.config, layer.mlp, layer.moe, x_nD), "decode mlp");
}

Tensor Decoder::sum_over_ranks(Tensor partial, const char* what) {
  partial = partial.contiguous();
  comm_.all_reduce(partial, what).wait();
  return partial;
}

Tensor Decoder::logits(const Tensor& hidden_mD) {
  const c10::InferenceMode inference;
  const Tensor own = project_rows(hidden_mD, shard_.head);
  std::vector<Tensor> all;
  for (int p = 0; p < comm_.size(); ++p) {
    const int64_t share = even_share(shard_.config.vocab_size, comm_.size(), p).size();
    all.push_back(at::empty({hidden_mD.size(0), share}, at::kFloat));
  }
  comm_.all_gather(own, all, "decode logits").wait();
  const Tensor logits_mV = at::cat(all, 1);
  // In fp64 a sum of finite numbers is finite.
  if (const double sum = logits_mV.sum(at::kDouble).item<double>(); !std::isfinite(sum)) {
    throw DataError("{}: expected weights that give finite logits, got {}", shard_.origin, sum);
  }
  return logits_mV;
}

}  // namespace parlat
