// Checkpoints and caches of every dtype, and models of other depths: decoding agrees with the definition in fp64, whose
// weights are the stored ones as a rank loads them.
#include <gtest/gtest.h>

#include "parlat/decode/decoder.h"
#include "parlat/decode/sliced_oracle.h"
#include "parlat/io/safetensors.h"
#include "parlat/kernels/decode_attention.h"
#include "parlat/tensor/fill.h"
#include "tests/decode/small_model.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using enum DecodeLayout;

std::vector<int64_t> random_tokens(int64_t count) {
  const Tensor tokens = seeded_integers({count}, 61, 3, "tokens");
  return {tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + count};
}

struct Case {
  LayoutSpec layout;
  int ranks = 1;
  at::ScalarType weights = at::kFloat, cache = at::kFloat;
};

// Most of the first page in one pass, then one by one into the second.
Tensor decoded(const std::filesystem::path& folder, const ModelConfig& config, const Case& run,
               const std::vector<int64_t>& tokens) {
  Tensor result;
  run_ranks(run.ranks, [&](Communicator& comm) {
    Decoder model(load_model_shard({.directory = folder, .slices = {}, .seed = 1}, config, run.layout, comm.size(),
                                   comm.rank(), run.weights),
                  comm, {.cache_tokens = 1024, .cache_dtype = run.cache, .slice_norm = false});
    model.cache().poison();
    const auto length = static_cast<int64_t>(tokens.size());
    const int64_t slot = model.add_sequence(length);
    std::vector<TokenAt> rows;
    for (int64_t i = 0; i < length - 8; ++i) rows.push_back({slot, i, tokens[i]});
    std::vector<Tensor> logits = {model.logits(model.forward(rows))};
    for (int64_t i = length - 8; i < length; ++i) logits.push_back(model.logits(model.forward({{slot, i, tokens[i]}})));
    if (comm.rank() == 0) result = at::cat(logits);
  });
  return result;
}

Tensor expected(const SavedModel& saved, const LayoutSpec& layout, const std::vector<int64_t>& tokens) {
  if (layout.groups == 1) return saved.logits(LocalAttention(), tokens);
  std::vector<SliceMaps> slices;
  for (int64_t g = 0; g < layout.groups; ++g)
    slices.push_back(plain_slice(saved.config.mla.dims.d_latent, layout.groups, g));
  return saved.logits(SlicedOracle(std::vector(saved.config.n_layers, slices), layout.layout == kGla), tokens);
}

// As the definition of layouts_test.cc: eight sums of up to 80 terms a layer.
Tolerance of_fp32(const ModelConfig& config) { return Tolerance::rounding(at::kFloat, 80, 8 * config.n_layers); }
// A row of the cache is rounded once, and is key and value of a layer. So may be what they are multiplied with.
Tolerance of_bf16_cache(const ModelConfig& config) {
  const int64_t rounded = decode_operand_dtype(at::kBFloat16) == at::kFloat ? 2 : 4;
  return Tolerance::rounding(at::kBFloat16, 80, rounded * config.n_layers);
}

TEST(Precision, OfBf16WeightsIsFp32sAndOfABf16CacheItsRounding) {
  const SavedModel saved(small_decode_model(), at::kBFloat16);
  const std::vector<int64_t> tokens = random_tokens(70);
  const Tensor whole = expected(saved, {kMla, 1}, tokens);
  for (const auto& [layout, ranks] :
       {std::pair{LayoutSpec{kMla, 1}, 3}, {{kDcp, 1}, 3}, {{kGla, 2}, 2}, {{kTpla, 2}, 4}, {{kTplaDcp, 2}, 4}}) {
    SCOPED_TRACE(name(layout.layout));
    const Tensor want = expected(saved, layout, tokens);
    EXPECT_CLOSE(decoded(saved.folder.path(), saved.config, {layout, ranks, at::kBFloat16}, tokens), want,
                 of_fp32(saved.config));
    const Tensor got =
        decoded(saved.folder.path(), saved.config, {layout, ranks, at::kBFloat16, at::kBFloat16}, tokens);
    EXPECT_CLOSE(got, want, of_bf16_cache(saved.config));
    // Not so wide that any other layout passes, and the cache is in bf16.
    EXPECT_EQ(compare(got, whole, of_bf16_cache(saved.config)).close, layout.groups == 1);
    EXPECT_FALSE(compare(got, want, of_fp32(saved.config)).close);
  }
}

// Weights near the largest fp16 and activations beyond it; one dense layer, and all but one.
TEST(Precision, OfFp16CheckpointsIsFp32s) {
  const std::vector<int64_t> tokens = random_tokens(40);
  for (const int64_t dense : {1, 3}) {
    SCOPED_TRACE(dense);
    const SavedModel saved(small_decode_model({{"num_hidden_layers", 4}, {"first_k_dense_replace", dense}}), at::kHalf,
                           /*out_scale=*/1 << 14);
    for (int64_t layer = 0; layer < 4; ++layer) EXPECT_EQ(saved.config.is_moe_layer(layer), layer >= dense);
    const auto expect_close = [&](at::ScalarType weights) {
      const Tensor want = expected(saved, {kMla, 1}, tokens);
      for (const int ranks : {1, 3}) {
        EXPECT_CLOSE(decoded(saved.folder.path(), saved.config, {{kMla, 1}, ranks, weights}, tokens), want,
                     of_fp32(saved.config))
            << name(weights) << " on " << ranks;
      }
    };
    expect_close(at::kFloat);
    for (const WeightRow& row : saved.table) {
      const bool kept = row.keep_fp32 || row.shape.size() == 1 || row.name.ends_with(".mlp.gate.weight");
      if (!kept) row.set(row.tensor->to(at::kBFloat16).to(at::kDouble));
    }
    expect_close(at::kBFloat16);
  }
}

// Products in blocks of 16 x 16, within which ranks' parts begin, and the same checkpoint with each multiplied out.
TEST(Precision, OfFp8IsThatOfItsDequantisedCopy) {
  constexpr int64_t kBlock = 16;
  SavedModel saved;
  const TemporaryFolder fp8, plain;
  std::vector<std::pair<std::string, Tensor>> of_fp8, of_plain;
  for (const WeightRow& row : saved.table) {
    Tensor weight = row.tensor->to(at::kFloat);
    if (row.name.ends_with("_proj.weight") || row.name.ends_with("_proj_with_mqa.weight")) {
      const auto blocks = [&](int64_t dimension) { return (row.shape[dimension] + kBlock - 1) / kBlock; };
      const Tensor quantised = (weight * 256).to(at::kFloat8_e4m3fn);
      // From 2^-10 to 2^-6, which leaves each product exact.
      const Tensor scale = at::pow(2.0, seeded_integers({blocks(0), blocks(1)}, 5, 4, row.name) - 10).to(at::kFloat);
      weight = quantised.to(at::kFloat) * scale.repeat_interleave(kBlock, 0)
                                              .repeat_interleave(kBlock, 1)
                                              .slice(0, 0, row.shape[0])
                                              .slice(1, 0, row.shape[1]);
      of_fp8.emplace_back(row.name, quantised);
      of_fp8.emplace_back(row.name + "_scale_inv", scale);
    } else {
      of_fp8.emplace_back(row.name, weight);
    }
    of_plain.emplace_back(row.name, weight);
    row.set(weight.to(at::kDouble));
  }
  write_safetensors(fp8 / "model.safetensors", of_fp8);
  write_safetensors(plain / "model.safetensors", of_plain);
  ModelConfig with_blocks = saved.config;
  with_blocks.fp8_block = {kBlock, kBlock};

  const std::vector<int64_t> tokens = random_tokens(20);
  for (const Case& run :
       {Case{{kMla, 1}, 1}, Case{{kMla, 1}, 3}, Case{{kTpla, 2}, 2}, Case{{kDcp, 1}, 2, at::kBFloat16}}) {
    SCOPED_TRACE(fmt::format("{} on {}, {}", name(run.layout.layout), run.ranks, name(run.weights)));
    const Tensor got = decoded(fp8.path(), with_blocks, run, tokens);
    EXPECT_TRUE(got.equal(decoded(plain.path(), saved.config, run, tokens)));
    if (run.weights == at::kFloat) {
      EXPECT_CLOSE(got, expected(saved, run.layout, tokens), of_fp32(saved.config));
    }
  }
}

}  // namespace
}  // namespace parlat
