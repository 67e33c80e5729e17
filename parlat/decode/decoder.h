#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "parlat/comm/communicator.h"
#include "parlat/decode/latent_cache.h"
#include "parlat/decode/model_shard.h"
#include "parlat/mla/rope.h"

namespace parlat {

// One token of one sequence, to be run and stored.
struct TokenAt {
  int64_t slot = 0;
  int64_t position = 0;
  int64_t token = 0;
};

struct DecoderOptions {
  int64_t cache_tokens = 4096;              // room, over all sequences; whole pages
  at::ScalarType cache_dtype = at::kFloat;  // fp32 or bf16
  // Normalise a slice by its own RMS, as the paper does: for comparison. Of models whose kv_norm is 1 only, since the
  // slices are of the latent after its norm, and their RMS would have its weights in it.
  bool slice_norm = false;
};

// The forward pass of a model over a latent cache, on one rank. Every rank calls the same methods with the same
// arguments; activations [n, D] fp32 are the same on every rank. Attention follows the layout; MLPs, experts and
// vocabulary are split over all ranks.
//   sent  a layer: two all-reduces of n D fp32, and what the layout's attention sends (parlat/decode/attend.h)
class Decoder {
 public:
  // Throws ConfigError where the cache is refused, and slice_norm for a kv_norm that is not 1.
  Decoder(ModelShard shard, Communicator& comm, const DecoderOptions& options);

  // Rows to be run together: of one sequence or many, prompts and single tokens mixed; those of a sequence in order of
  // position, without gaps after what it has stored. Each sees what its sequence has stored and itself, through the
  // layout's slices. Returns hidden [n, D] after the final norm. Throws ConfigError for tokens outside the vocabulary.
  Tensor forward(const std::vector<TokenAt>& rows);

  // The exact prefill of one sequence, in chunks: attention with the whole latent and explicit keys and values of the
  // rank's heads; the cache receives the slices. Holds the whole latents of the prompt, [T, L + R] a layer.
  struct Prefill {
    int64_t slot = 0, done = 0;
    std::vector<Tensor> latents;  // a layer's
  };
  Tensor prefill(Prefill& state, const std::vector<int64_t>& tokens);

  // Rows [n, w + R] of a layer that were made elsewhere: those from `first` on of the slot on this rank. The slices as
  // their maps give them, before their own norm.
  void import_rows(int64_t slot, int64_t layer, int64_t first, const Tensor& rows_nd);

  // hidden [m, D] -> [m, vocabulary] fp32, on every rank. Throws DataError, naming the checkpoint, where they are not
  // finite: its weights are not, or nearly so.
  Tensor logits(const Tensor& hidden_mD);

  // A sequence of at most `tokens` tokens. Members that split tokens all take the pages of the one with most of them,
  // so that they are full together and admit the same sequences. Throws ConfigError where the cache has no room.
  int64_t add_sequence(int64_t tokens) { return cache_.add(shard_.placement.most_count(tokens)); }
  bool has_room(int64_t tokens) const;  // now
  bool fits(int64_t tokens) const;      // in an empty cache
  int64_t cache_tokens() const;         // of one sequence that has it all
  // DecoderOptions::cache_tokens that has room for sequences of so many tokens at once.
  static int64_t cache_tokens_for(const std::vector<int64_t>& lengths, const Placement& placement);
  void release(int64_t slot) { cache_.release(slot); }

  const ModelConfig& config() const { return shard_.config; }
  const ModelShard& shard() const { return shard_; }
  LatentCache& cache() { return cache_; }
  // Bytes a token takes on this rank, over all layers: a row's, shared by the members that split tokens.
  double cache_bytes_per_token() const;

 private:
  struct Step;
  int64_t pages_needed(int64_t tokens) const;
  Tensor run(const std::vector<int64_t>& tokens, const Tensor& positions_n, Step& step);
  Tensor embed(const std::vector<int64_t>& tokens);
  Tensor layers(Tensor x_nD, const Step& step);
  Tensor attention(int64_t layer, const Tensor& x_nD, const Step& step);
  Tensor query(const AttentionShard& a, Tensor projected, const RopeTable& rope) const;
  void finish_latent(const AttentionShard& a, const Tensor& latent_nd, const RopeTable& rope) const;
  void store(int64_t layer, const Tensor& latent_nd, const Step& step);
  // Rows [n, w + R] into the cache, slices by their own RMS where that is asked for.
  void keep(int64_t layer, Tensor rows_nd, const std::vector<LatentCache::Place>& places);
  Tensor sliced_attention(int64_t layer, const Tensor& q_nhd, const Step& step);
  Tensor exact_attention(int64_t layer, const Tensor& q_nhd, const Tensor& latent_nd, const Step& step);
  Tensor feed_forward(const LayerShard& layer, const Tensor& x_nD);
  Tensor sum_over_ranks(Tensor partial, const char* what);

  ModelShard shard_;
  Communicator& comm_;
  std::unique_ptr<Communicator> members_;  // those that split tokens
  DecoderOptions options_;
  LatentCache cache_;
};

}  // namespace parlat
