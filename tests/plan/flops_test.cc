// Counts of FLOPs and parameters against figures that the models' authors publish, and against sums written out.
#include "parlat/plan/flops.h"

#include <gmock/gmock.h>

namespace parlat {
namespace {

TEST(Parameters, OfPublishedModels) {
  // DeepSeek-V3 technical report: 671 B, 37 B activated (without the embedding, which is looked up: 36.6 B; with
  // it 37.6).
  const ParameterCount v3 = count_parameters(load_model_config("v3"));
  EXPECT_NEAR(static_cast<double>(v3.total), 671.0e9, 0.5e9);
  EXPECT_NEAR(static_cast<double>(v3.active), 37e9, 1e9);
  // DeepSeek-V2 paper: 236 B and 21 B; V2-Lite 15.7 B and 2.4 B. V2's 21 B leave out the output head's 0.5 B.
  const ParameterCount v2 = count_parameters(load_model_config("v2"));
  EXPECT_NEAR(static_cast<double>(v2.total), 236e9, 0.5e9);
  EXPECT_NEAR(static_cast<double>(v2.active), 21e9, 1e9);
  const ParameterCount lite = count_parameters(load_model_config("v2-lite"));
  EXPECT_NEAR(static_cast<double>(lite.total), 15.7e9, 0.05e9);
  EXPECT_NEAR(static_cast<double>(lite.active), 2.4e9, 0.3e9);
}

// D 8, H 2, N 4, R 2, V 4, L 6, Q 5.
MlaDims small_dims() {
  return {.d_model = 8, .n_heads = 2, .d_nope = 4, .d_rope = 2, .d_v = 4, .d_latent = 6, .d_q_latent = 5};
}

TEST(AttentionFlopsOf, SmallLayerWrittenOut) {
  // w_dq 5*8, w_uq 12*5, w_dkv 8*8, w_ukv 16*6, w_o 8*8 weights; documents of 3 and 1 tokens have 6 and 1 pairs.
  const AttentionFlops flops = attention_flops(small_dims(), {3, 1});
  EXPECT_EQ(flops.projections, 2.0 * 4 * (40 + 60 + 64 + 96 + 64));
  EXPECT_EQ(flops.attention, 2.0 * 7 * 2 * (6 + 4));
}

TEST(AttentionFlopsOf, DirectQueryProjection) {
  MlaDims dims = small_dims();
  dims.d_q_latent.reset();
  EXPECT_EQ(attention_flops(dims, {1}).projections, 2.0 * (8 * 12 + 64 + 96 + 64));
}

TEST(ForwardFlops, CountsTheExpertsATokenVisits) {
  ModelConfig config;
  config.mla.dims = small_dims();
  config.n_layers = 3;
  config.vocab_size = 100;
  config.d_mlp = 16;
  const double attention_and_head = 3 * (2.0 * (40 + 60 + 64 + 96 + 64) + 2.0 * 20) + 2.0 * 800;
  EXPECT_EQ(forward_flops(config, {1}), attention_and_head + 3 * 2.0 * 3 * 8 * 16);

  config.moe = MoeSpec{.n_routed = 10, .n_shared = 1, .experts_per_token = 2, .d_expert = 4, .first_dense = 1};
  const double moe_layer = 2.0 * (10 * 8 + 3 * 3 * 8 * 4);  // router, then 2 + 1 experts
  EXPECT_EQ(forward_flops(config, {1}), attention_and_head + 2.0 * 3 * 8 * 16 + 2 * moe_layer);
}

TEST(ForwardFlops, PerTokenIsAboutTwiceTheActiveParameters) {
  // At one token attention is negligible and all active parameters but the embedding and norms are multiplied once.
  const ModelConfig v3 = load_model_config("v3");
  const double embedding = static_cast<double>(v3.vocab_size * v3.mla.dims.d_model);
  const double multiplied = static_cast<double>(count_parameters(v3).active) - embedding;
  EXPECT_NEAR(forward_flops(v3, {1}) / (2 * multiplied), 1.0, 1e-3);
}

TEST(Parameters, TiedEmbeddingsCountOnce) {
  ModelConfig config = load_model_config("tiny");
  config.tied_embeddings = false;
  const int64_t untied = count_parameters(config).total;
  config.tied_embeddings = true;
  EXPECT_EQ(untied - count_parameters(config).total, config.vocab_size * config.mla.dims.d_model);
}

}  // namespace
}  // namespace parlat
