#include "parlat/bench/layout_check.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "parlat/decode/decoder.h"
#include "parlat/decode/sliced_oracle.h"
#include "parlat/kernels/decode_attention.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

// Choosing experts jumps where two of them score nearly alike and rounding decides. Which are chosen is no matter of
// layouts, and all of them together do not jump.
ModelConfig with_all_experts(ModelConfig config) {
  if (config.moe) {
    config.moe->experts_per_token = config.moe->n_routed;
    config.moe->topk_group = config.moe->n_group;
  }
  return config;
}

std::vector<int64_t> tokens_of(const LayoutCase& layout_case) {
  const Tensor drawn =
      seeded_integers({layout_case.tokens}, layout_case.model.vocab_size, layout_case.source.seed, "layout check");
  const int64_t* const first = drawn.const_data_ptr<int64_t>();
  return {first, first + layout_case.tokens};
}

struct Definition {
  Tensor exact, rounded;  // with what a rank keeps rounded to its dtype; [S, vocabulary] fp64
};

// Of the whole model, on one rank.
Definition defined_logits(const LayoutCase& layout_case) {
  const ModelSource& source = layout_case.source;
  const ModelConfig config = with_all_experts(layout_case.model);
  const LayoutSpec& layout = layout_case.layout;
  const at::ScalarType dtype = layout_case.dtype, cache_dtype = layout_case.cache_dtype;
  const std::vector<int64_t> tokens = tokens_of(layout_case);
  const int64_t count = layout_case.tokens;
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
  const auto logits_of = [&](at::ScalarType kept, Communicator& one) {
    const SlicedOracle oracle(slices, layout.layout == DecodeLayout::kGla, kept);
    const Transformer model(config, weights, oracle, one);
    const TokenShard shard = make_token_shard(config.mla, Documents::whole(1, count),
                                              SequenceShards::contiguous(count, 1), 0, true, at::kDouble);
    return model.logits(model.forward(at::tensor(tokens, at::kLong).view({1, count}), shard))[0];
  };
  // Maps have the weights' dtype, rows the cache's: the coarser bounds both.
  const at::ScalarType coarser = c10::elementSize(cache_dtype) < c10::elementSize(dtype) ? cache_dtype : dtype;
  Definition defined;
  run_local_ranks(1, [&](Communicator& one) {
    const at::NoGradGuard no_grad;
    defined = {logits_of(at::kDouble, one), logits_of(coarser, one)};
  });
  return defined;
}

struct Decoded {
  Tensor logits, positions;  // [n, vocabulary], [n]
};

Decoded decode_tokens(Decoder& decoder, const std::vector<int64_t>& tokens) {
  constexpr int64_t kSteps = 3;
  struct Sequence {
    int64_t slot, length, done = 0;
  };
  std::vector<Sequence> sequences;
  const auto count = static_cast<int64_t>(tokens.size());
  for (const int64_t length : {count, (count + 1) / 2}) sequences.push_back({decoder.add_sequence(length), length});
  std::vector<Tensor> logits;
  std::vector<int64_t> positions;
  for (int64_t step = 0; step <= kSteps; ++step) {
    std::vector<TokenAt> rows;
    for (auto& [slot, length, done] : sequences) {
      for (; done < length - kSteps + step; ++done) {
        rows.push_back({slot, done, tokens[done]});
        positions.push_back(done);
      }
    }
    if (!rows.empty()) logits.push_back(decoder.logits(decoder.forward(rows)));
  }
  return {at::cat(logits), at::tensor(positions, at::kLong)};
}

// Activations are fp32 and weights the same numbers on both sides, so eight products and sums follow one another in
// each layer in fp32, and 16 bits round what a rank keeps. What that is worth depends on the model, whose softmax may
// magnify it: as far as it moves the definition, it is one draw of what it does here, whose spread kSafety covers. What
// meets a rank's rows, queries and weights, may be rounded to 16 bits, too: another draw.
Tolerance logits_tolerance(const LayoutCase& layout_case, const Definition& defined) {
  const ModelConfig& config = layout_case.model;
  const Tolerance fp32 = Tolerance::rounding(at::kFloat, config.mla.dims.d_model, 8 * config.n_layers);
  const double draws = decode_operand_dtype(layout_case.cache_dtype) == at::kFloat ? 1 : 2;
  const double rounded = std::sqrt(draws) * compare(defined.rounded, defined.exact, fp32).relative;
  return {fp32.relative_to_norm + Tolerance::kSafety * rounded};
}

}  // namespace

LayoutDefinition define_layout(const LayoutCase& layout_case) {
  const Definition defined = defined_logits(layout_case);
  return {defined.exact, logits_tolerance(layout_case, defined)};
}

LayoutCheck check_shard(ModelShard shard, const LayoutCase& layout_case, const LayoutDefinition& definition,
                        Communicator& comm) {
  const std::vector<int64_t> tokens = tokens_of(layout_case);
  shard.config = with_all_experts(layout_case.model);
  const Placement placement = shard.placement;
  Decoder decoder(std::move(shard), comm,
                  {.cache_tokens = Decoder::cache_tokens_for({layout_case.tokens, layout_case.tokens}, placement),
                   .cache_dtype = layout_case.cache_dtype,
                   .slice_norm = false});
  const Decoded got = decode_tokens(decoder, tokens);
  const Tensor want = definition.logits_SV.index_select(0, got.positions);
  const Comparison result = compare(got.logits, want, definition.tolerance);
  return {.max_error = comm.max_over_ranks(result.relative, "layout check"),
          .tolerance = definition.tolerance.relative_to_norm,
          .ok = comm.max_over_ranks(result.close ? 0 : 1, "layout check") == 0};
}

LayoutCheck check_layout(const LayoutCase& layout_case, const LayoutDefinition& definition, Communicator& comm) {
  return check_shard(load_model_shard(layout_case.source, layout_case.model, layout_case.layout, comm.size(),
                                      comm.rank(), layout_case.dtype),
                     layout_case, definition, comm);
}

}  // namespace parlat
