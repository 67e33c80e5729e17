#include "parlat/weights/weight_table.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <set>

#include "parlat/base/error.h"
#include "tests/weights/small_model.h"

namespace parlat {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

int64_t parameters(const ModelConfig& config) {
  ModelWeights weights;
  int64_t count = 0;
  for (const WeightRow& row : weight_table(config, all_experts(config), weights)) {
    count += c10::multiply_integers(row.shape);
  }
  return count;
}

// The published totals, in billions: a wrong shape or count anywhere shows.
TEST(WeightTable, PublicModelsHaveTheirPublishedSizes) {
  const auto billions = [](const char* name) { return static_cast<double>(parameters(load_model_config(name))) / 1e9; };
  EXPECT_NEAR(billions("v3"), 671.0, 0.1);
  EXPECT_NEAR(billions("v2"), 235.7, 0.1);
  EXPECT_NEAR(billions("v2-lite"), 15.7, 0.05);
  EXPECT_NEAR(billions("k2"), 1026.4, 0.5);
  EXPECT_NEAR(billions("moonlight"), 15.96, 0.05);
  EXPECT_NEAR(billions("youtu"), 1.96, 0.005);
}

TEST(WeightTable, NamesShapesAndKinds) {
  const ModelConfig config = small_model();
  ModelWeights weights;
  const auto table = weight_table(config, all_experts(config), weights);
  std::map<std::string, const WeightRow*> rows;
  for (const WeightRow& row : table) rows[row.name] = &row;
  EXPECT_EQ(rows.size(), table.size()) << "a name occurs twice";
  const auto shape = [&](const char* name) { return rows.at(name)->shape; };
  EXPECT_THAT(shape("model.embed_tokens.weight"), ElementsAre(61, 32));
  EXPECT_THAT(shape("model.layers.0.self_attn.q_a_proj.weight"), ElementsAre(24, 32));
  EXPECT_THAT(shape("model.layers.0.self_attn.q_b_proj.weight"), ElementsAre(48, 24));
  EXPECT_THAT(shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight"), ElementsAre(20, 32));
  EXPECT_THAT(shape("model.layers.0.self_attn.kv_b_proj.weight"), ElementsAre(64, 16));
  EXPECT_THAT(shape("model.layers.0.self_attn.o_proj.weight"), ElementsAre(32, 32));
  EXPECT_THAT(shape("model.layers.0.mlp.gate_proj.weight"), ElementsAre(48, 32));
  EXPECT_THAT(shape("model.layers.1.mlp.experts.3.down_proj.weight"), ElementsAre(32, 16));
  EXPECT_THAT(shape("model.layers.1.mlp.shared_experts.up_proj.weight"), ElementsAre(16, 32));
  const WeightRow& bias = *rows.at("model.layers.1.mlp.gate.e_score_correction_bias");
  EXPECT_FALSE(bias.trained);
  EXPECT_TRUE(bias.keep_fp32);
  EXPECT_TRUE(rows.at("model.layers.1.mlp.experts.0.gate_proj.weight")->expert);
  EXPECT_FALSE(rows.at("model.layers.1.mlp.shared_experts.gate_proj.weight")->expert);
  EXPECT_EQ(rows.count("model.layers.0.self_attn.q_proj.weight"), 0u);
}

TEST(WeightTable, WithoutQueryLatentBiasOrHead) {
  ModelConfig config = small_model(/*tied=*/true);
  config.mla.dims.d_q_latent.reset();
  config.moe->gating = Gating::kGreedy;
  config.moe->n_shared = 0;
  ModelWeights weights;
  std::vector<std::string> names;
  for (const WeightRow& row : weight_table(config, all_experts(config), weights)) names.push_back(row.name);
  EXPECT_THAT(names, Contains("model.layers.0.self_attn.q_proj.weight"));
  for (const char* absent :
       {"lm_head.weight", "model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.q_a_layernorm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.shared_experts.gate_proj.weight"}) {
    EXPECT_THAT(names, Not(Contains(absent)));
  }
  EXPECT_FALSE(weights.layers[1].moe->shared.has_value());
}

TEST(WeightTable, LocalExpertsOnly) {
  const ModelConfig config = small_model();
  ModelWeights weights;
  std::vector<std::string> experts;
  for (const WeightRow& row : weight_table(config, {1, 3}, weights)) {
    if (row.expert && row.name.find("up_proj") != std::string::npos) experts.push_back(row.name);
  }
  EXPECT_THAT(experts, ElementsAre("model.layers.1.mlp.experts.1.up_proj.weight",
                                   "model.layers.1.mlp.experts.2.up_proj.weight"));
  EXPECT_EQ(weights.layers[1].moe->local_experts, (Range{1, 3}));
  EXPECT_THROW(weight_table(config, {2, 5}, weights), InternalError);
}

TEST(WeightTable, InitialWeightsAreTheSameOnEveryRank) {
  const ModelConfig config = small_model(/*tied=*/true);
  ModelWeights all, some;
  const auto everything = weight_table(config, all_experts(config), all);
  const auto local = weight_table(config, {2, 4}, some);
  initialize(everything, config, 5, at::kFloat);
  initialize(local, config, 5, at::kFloat);
  EXPECT_TRUE(some.layers[1].moe->experts[1].w_gate.equal(all.layers[1].moe->experts[3].w_gate));
  EXPECT_TRUE(some.layers[0].mla.w_o.equal(all.layers[0].mla.w_o));
  EXPECT_FALSE(all.layers[0].mla.w_o.equal(all.layers[1].mla.w_o));
  EXPECT_TRUE(all.head.is_same(all.embedding));
  EXPECT_NEAR(all.layers[0].mlp->w_gate.std().item<double>(), 0.02, 0.002);
  EXPECT_TRUE(all.final_norm.equal(at::ones({32})));
  EXPECT_TRUE(all.layers[1].moe->selection_bias.equal(at::zeros({4})));
  initialize(everything, config, 5, at::kBFloat16);
  EXPECT_EQ(all.embedding.scalar_type(), at::kBFloat16);
  EXPECT_EQ(all.layers[1].moe->selection_bias.scalar_type(), at::kFloat);
}

TEST(WeightTable, YoutuEmbeddingsAreWider) {
  ModelConfig config = small_model();
  config.embedding_initializer_range = 0.5;
  ModelWeights weights;
  initialize(weight_table(config, all_experts(config), weights), config, 5, at::kFloat);
  EXPECT_NEAR(weights.embedding.std().item<double>(), 0.5, 0.05);
  EXPECT_NEAR(weights.head.std().item<double>(), 0.02, 0.002);
}

}  // namespace
}  // namespace parlat
