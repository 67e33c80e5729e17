#include "parlat/bench/layout_check.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "parlat/decode/decoder.h"
#include "parlat/decode/sliced_oracle.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

struct Definition {
  Tensor exact, rounded;  // with what a rank keeps rounded to its dtype; [S, vocabulary] fp64
};

// Of the whole model, on one rank.
Definition defined_logits(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                          at::ScalarType dtype, const std::vector<int64_t>& tokens) {
  ModelWeights weights;
  std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  keep_small_weights(table);
  if (source.directory.empty()) {
    initialize(table, config, source.seed, dtype);
  } else {
    load_weights(source.directory, config, table, dtype);
  }
  for (const WeightRow& row : table) row.set(row.tensor->to(at::kDouble));

  std::vector<std::vector<SliceMaps>> slices(config.n_layers);
  for (int64_t group = 0; group < layout.groups; ++group) {
    const std::vector<SliceMaps> maps = slice_maps(source, config, layout, group);
    for (int64_t i = 0; i < config.n_layers; ++i) {
      slices[i].push_back(maps[i].store_Lw.defined() ? maps[i] : plain_slice(config.mla.dims.d_latent, 1, 0));
    }
  }
  const auto length = static_cast<int64_t>(tokens.size());
  const auto logits_of = [&](at::ScalarType kept, Communicator& one) {
    const SlicedOracle oracle(slices, layout.layout == DecodeLayout::kGla, kept);
    const Transformer model(config, weights, oracle, one);
    const TokenShard shard = make_token_shard(config.mla, Documents::whole(1, length),
                                              SequenceShards::contiguous(length, 1), 0, true, at::kDouble);
    return model.logits(model.forward(at::tensor(tokens, at::kLong).view({1, length}), shard))[0];
  };
  Definition defined;
  run_local_ranks(1, [&](Communicator& one) {
    const at::NoGradGuard no_grad;
    defined = {logits_of(at::kDouble, one), logits_of(dtype, one)};
  });
  return defined;
}

Tensor decoded_logits(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                      at::ScalarType dtype, const std::vector<int64_t>& tokens, Communicator& comm) {
  const auto length = static_cast<int64_t>(tokens.size());
  Decoder decoder(load_model_shard(source, config, layout, comm.size(), comm.rank(), dtype), comm,
                  {.cache_tokens = length + kPageTokens * comm.size(), .cache_dtype = dtype, .slice_norm = false});
  const int64_t slot = decoder.add_sequence(length), at_once = length - std::min<int64_t>(length, 3);
  std::vector<TokenAt> rows;
  for (int64_t i = 0; i < at_once; ++i) rows.push_back({slot, i, tokens[i]});
  std::vector<Tensor> logits;
  if (!rows.empty()) logits.push_back(decoder.logits(decoder.forward(rows)));
  for (int64_t i = at_once; i < length; ++i) logits.push_back(decoder.logits(decoder.forward({{slot, i, tokens[i]}})));
  return at::cat(logits);
}

// Activations are fp32 and weights the same numbers on both sides, so eight products and sums follow one another in
// each layer in fp32, and 16 bits round what a rank keeps. What that is worth depends on the model, whose softmax may
// magnify it: as far as it moves the definition, it is one draw of what it does here, whose spread kSafety covers.
Tolerance logits_tolerance(const ModelConfig& config, const Definition& defined) {
  const Tolerance fp32 = Tolerance::rounding(at::kFloat, config.mla.dims.d_model, 8 * config.n_layers);
  const double rounded = compare(defined.rounded, defined.exact, fp32).relative;
  return {fp32.relative_to_norm + Tolerance::kSafety * rounded};
}

// Choosing experts jumps where two of them score nearly alike and rounding decides. Which are chosen is no matter of
// layouts, and all of them together do not jump.
ModelConfig with_all_experts(ModelConfig config) {
  if (config.moe) {
    config.moe->experts_per_token = config.moe->n_routed;
    config.moe->topk_group = config.moe->n_group;
  }
  return config;
}

}  // namespace

LayoutCheck check_layout(const ModelSource& source, const ModelConfig& model, const LayoutSpec& layout,
                         at::ScalarType dtype, int64_t tokens, Communicator& comm) {
  const ModelConfig config = with_all_experts(model);
  const Tensor drawn = seeded_integers({tokens}, config.vocab_size, source.seed, "layout check");
  const std::vector<int64_t> text(drawn.const_data_ptr<int64_t>(), drawn.const_data_ptr<int64_t>() + tokens);
  const Tensor got = decoded_logits(source, config, layout, dtype, text, comm);
  LayoutCheck check;
  if (comm.rank() == 0) {
    const Definition want = defined_logits(source, config, layout, dtype, text);
    const Tolerance tolerance = logits_tolerance(config, want);
    const Comparison result = compare(got, want.exact, tolerance);
    check = {result.relative, tolerance.relative_to_norm, result.close};
  }
  check.max_error = comm.max_over_ranks(check.max_error, "layout check");
  check.tolerance = comm.max_over_ranks(check.tolerance, "layout check");
  check.ok = comm.max_over_ranks(check.ok ? 1 : 0, "layout check") > 0;
  return check;
}

}  // namespace parlat
