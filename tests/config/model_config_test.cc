// What a config.json means: every variant of keys that real checkpoints have, and every value that is refused.
#include "parlat/config/model_config.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "parlat/base/error.h"

namespace parlat {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// `file` with the keys of `change` set.
ModelConfig parse(const char* file, const char* change = "{}") {
  json merged = json::parse(file);
  const json changes = json::parse(change);
  for (const auto& [key, value] : changes.items()) merged[key] = value;
  return parse_model_config(merged, "config.json");
}

std::string refusal(const char* file, const char* change) {
  try {
    parse(file, change);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

constexpr const char* kV3 = R"({
  "model_type": "deepseek_v3", "hidden_size": 64, "num_attention_heads": 4, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 32, "q_lora_rank": 48, "num_hidden_layers": 3,
  "vocab_size": 100, "intermediate_size": 80, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
  "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
  "routed_scaling_factor": 2.5, "max_position_embeddings": 128})";

constexpr const char* kV2 = R"({
  "model_type": "deepseek_v2", "hidden_size": 64, "num_attention_heads": 4, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 32, "num_hidden_layers": 2, "vocab_size": 100,
  "intermediate_size": 80, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
  "moe_intermediate_size": 24, "first_k_dense_replace": 1})";

TEST(ModelConfig, ReadsEveryWidth) {
  const ModelConfig c = parse(kV3);
  const MlaDims& d = c.mla.dims;
  EXPECT_THAT((std::vector<int64_t>{d.d_model, d.n_heads, d.d_nope, d.d_rope, d.d_v, d.d_latent, *d.d_q_latent}),
              ElementsAre(64, 4, 16, 8, 12, 32, 48));
  EXPECT_THAT((std::vector<int64_t>{c.n_layers, c.vocab_size, c.d_mlp, c.max_positions}), ElementsAre(3, 100, 80, 128));
  ASSERT_TRUE(c.moe);
  EXPECT_THAT((std::vector<int64_t>{c.moe->n_routed, c.moe->n_shared, c.moe->experts_per_token, c.moe->d_expert,
                                    c.moe->first_dense, c.moe->n_group, c.moe->topk_group}),
              ElementsAre(8, 2, 2, 24, 1, 4, 2));
  EXPECT_EQ(c.moe->gating, Gating::kNoauxTc);
  EXPECT_TRUE(c.moe->norm_topk_prob);
  EXPECT_DOUBLE_EQ(c.moe->routed_scaling_factor, 2.5);
  EXPECT_FALSE(c.is_moe_layer(0));
  EXPECT_TRUE(c.is_moe_layer(1));
  EXPECT_DOUBLE_EQ(c.mla.inner_norm_eps, 1e-6);
  EXPECT_THAT(c.ignored_keys, IsEmpty());
}

TEST(ModelConfig, AbsentQueryLatentIsTheClassDefaultNullIsNone) {
  EXPECT_EQ(parse(kV2).mla.dims.d_q_latent, 1536);
  EXPECT_FALSE(parse(kV2, R"({"q_lora_rank": null})").mla.dims.d_q_latent.has_value());
  EXPECT_EQ(parse(kV2, R"({"q_lora_rank": 24})").mla.dims.d_q_latent, 24);
}

TEST(ModelConfig, AbsentKeysHaveTheDefaultsOfTheirClass) {
  const ModelConfig v3 = parse(R"({"model_type": "deepseek_v3"})");
  EXPECT_EQ(v3.mla.dims.d_model, 7168);
  EXPECT_EQ(v3.moe->n_routed, 256);
  EXPECT_EQ(v3.max_positions, 4096);
  const ModelConfig v2 = parse(R"({"model_type": "deepseek_v2", "num_experts_per_tok": 6})");
  EXPECT_EQ(v2.mla.dims.d_model, 4096);
  EXPECT_EQ(v2.moe->d_expert, 1407);
  EXPECT_EQ(v2.moe->gating, Gating::kGreedy);
  EXPECT_FALSE(v2.tied_embeddings);
  const ModelConfig youtu = parse(R"({"model_type": "youtu"})");
  EXPECT_EQ(youtu.d_mlp, 6144);
  EXPECT_TRUE(youtu.tied_embeddings);
  EXPECT_FALSE(youtu.moe.has_value());
}

TEST(ModelConfig, YoutuDerivesItsInitialisation) {
  const ModelConfig c = parse(R"({"model_type": "youtu_llm", "hidden_size": 80, "num_attention_heads": 4})");
  EXPECT_EQ(c.model_type, "youtu");
  EXPECT_DOUBLE_EQ(c.initializer_range, 0.1);
  EXPECT_DOUBLE_EQ(*c.embedding_initializer_range, 0.2);
}

TEST(ModelConfig, RopeScalingOfTransformers4) {
  const RopeSpec r = parse(kV3, R"({"rope_theta": 50000, "rope_scaling": {"type": "yarn", "factor": 40,
    "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0.5}})")
                         .mla.rope;
  EXPECT_EQ(r.type, RopeSpec::Type::kYarn);
  EXPECT_DOUBLE_EQ(r.theta, 50000);
  EXPECT_DOUBLE_EQ(r.factor, 40);
  EXPECT_EQ(r.original_max_positions, 32);
  EXPECT_DOUBLE_EQ(*r.mscale, 1);
  EXPECT_DOUBLE_EQ(*r.mscale_all_dim, 0.5);
}

TEST(ModelConfig, RopeParametersOfTransformers5) {
  const RopeSpec r = parse(kV3, R"({"rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 20000.0,
    "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": false}})")
                         .mla.rope;
  EXPECT_DOUBLE_EQ(r.theta, 20000);
  EXPECT_EQ(r.original_max_positions, 128);  // max_position_embeddings
  EXPECT_DOUBLE_EQ(r.beta_fast, 1);
  EXPECT_FALSE(r.truncate);
  const RopeSpec plain = parse(kV3, R"({"rope_parameters": {"rope_type": "default", "rope_theta": 7000}})").mla.rope;
  EXPECT_EQ(plain.type, RopeSpec::Type::kDefault);
  EXPECT_DOUBLE_EQ(plain.theta, 7000);
}

TEST(ModelConfig, InterleavingIsTheDefaultAndAChoiceForV3Only) {
  EXPECT_TRUE(parse(kV3).mla.rope.interleaved);
  EXPECT_FALSE(parse(kV3, R"({"rope_interleave": false})").mla.rope.interleaved);
  EXPECT_TRUE(parse(kV2, R"({"rope_interleave": true})").mla.rope.interleaved);
  EXPECT_THAT(refusal(kV2, R"({"rope_interleave": false})"), HasSubstr("rope_interleave: expected true"));
}

TEST(ModelConfig, NestedTextModel) {
  json outer = {{"model_type", "kimi_k25"},
                {"text_config", json::parse(kV3)},
                {"vision_config", {{"hidden_size", 9}}},
                {"tie_word_embeddings", true}};
  outer["text_config"]["model_type"] = "kimi_k2";
  ModelConfig c = parse_model_config(outer, "config.json");
  EXPECT_EQ(c.model_type, "kimi_k2");
  EXPECT_EQ(c.mla.dims.d_model, 64);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(c.hf, outer["text_config"]);
  EXPECT_THAT(c.ignored_keys, ElementsAre("vision_config"));
  outer["text_config"]["tie_word_embeddings"] = false;
  EXPECT_THROW(parse_model_config(outer, "config.json"), ConfigError);
  outer["text_config"]["hidden_size"] = "64";
  outer["tie_word_embeddings"] = false;
  try {
    parse_model_config(outer, "config.json");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("config.json: text_config.hidden_size: expected an integer"));
  }
}

TEST(ModelConfig, NullKeyValueHeadsMeanAllHeads) {
  EXPECT_EQ(parse(kV3, R"({"num_key_value_heads": null})").mla.dims.n_heads, 4);
  EXPECT_EQ(parse(kV3, R"({"num_key_value_heads": 4})").mla.dims.n_heads, 4);
}

TEST(ModelConfig, GatingsOfV2) {
  const ModelConfig greedy = parse(kV2, R"({"topk_method": "greedy", "n_group": null, "topk_group": null})");
  EXPECT_EQ(greedy.moe->gating, Gating::kGreedy);
  const ModelConfig grouped = parse(
      kV2, R"({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "scoring_func": "softmax"})");
  EXPECT_EQ(grouped.moe->gating, Gating::kGroupLimitedGreedy);
  EXPECT_EQ(grouped.moe->n_group, 4);
}

TEST(ModelConfig, WithoutExpertLayersThereAreNoExperts) {
  EXPECT_FALSE(parse(kV3, R"({"first_k_dense_replace": 3})").moe.has_value());
  EXPECT_FALSE(parse(kV3, R"({"n_routed_experts": null})").moe.has_value());
  EXPECT_FALSE(parse(kV3, R"({"n_routed_experts": 0, "topk_method": "none of ours"})").moe.has_value());
  const ModelConfig every_other = parse(kV3, R"({"moe_layer_freq": 2})");
  EXPECT_FALSE(every_other.is_moe_layer(1));
  EXPECT_TRUE(every_other.is_moe_layer(2));
}

TEST(ModelConfig, UnknownKeysAreListed) {
  const ModelConfig c = parse(kV3, R"({"architectures": ["X"], "ep_size": 1, "my_note": "hello", "sliding_window": null,
    "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0})");
  EXPECT_THAT(c.ignored_keys, ElementsAre("my_note"));
}

struct Refused {
  const char* change;
  const char* expected;
};
class Refuses : public ::testing::TestWithParam<Refused> {};

TEST_P(Refuses, NamingKeyAndValues) {
  EXPECT_THAT(refusal(kV3, GetParam().change), AllOf(HasSubstr("config.json: "), HasSubstr(GetParam().expected)));
}

INSTANTIATE_TEST_SUITE_P(
    ModelConfig, Refuses,
    ::testing::Values(
        Refused{R"({"hidden_size": "7168"})", R"(hidden_size: expected an integer from 1 to 16777216, got "7168")"},
        Refused{R"({"hidden_size": -1})", "hidden_size: expected an integer from 1 to 16777216, got -1"},
        Refused{R"({"hidden_size": 0})", "got 0"}, Refused{R"({"hidden_size": 1e30})", "got 1e+30"},
        Refused{R"({"hidden_size": 64.0})", "got 64.0"}, Refused{R"({"hidden_size": null})", "got null"},
        Refused{R"({"hidden_size": 18446744073709551615})", "got 18446744073709551615"},
        Refused{R"({"num_hidden_layers": true})", "num_hidden_layers: expected an integer"},
        Refused{R"({"q_lora_rank": 0})", "q_lora_rank"}, Refused{R"({"qk_rope_head_dim": 7})", "qk_rope_head_dim"},
        Refused{R"({"rms_norm_eps": "1e-6"})", R"(rms_norm_eps: expected a number from 0 to 1, got "1e-6")"},
        Refused{R"({"tie_word_embeddings": 1})", "tie_word_embeddings: expected true or false, got 1"},
        Refused{R"({"model_type": "llama"})", "model_type: expected deepseek_v2, deepseek_v3, kimi_k2 or youtu"},
        Refused{R"({"model_type": "deepseek_v32"})", R"(got "deepseek_v32")"},
        Refused{R"({"hidden_act": "gelu"})", R"(hidden_act: expected silu, got "gelu")"},
        Refused{R"({"attention_bias": true})", "attention_bias"},
        Refused{R"({"attention_dropout": 0.1})", "attention_dropout"},
        Refused{R"({"sliding_window": 4096})", "sliding_window"},
        Refused{R"({"quantization_config": {"quant_method": "fp8"}})", "quantization_config"},
        Refused{R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor"},
        Refused{R"({"num_key_value_heads": 2})",
                "num_key_value_heads: expected null or num_attention_heads (4), got 2"},
        Refused{R"({"qk_head_dim": 20})", "qk_head_dim: expected qk_nope_head_dim + qk_rope_head_dim (24), got 20"},
        Refused{R"({"index_topk": 2048})", "index_topk"}, Refused{R"({"use_mla": false})", "use_mla"},
        Refused{R"({"final_logit_softcapping": 30.0})", "final_logit_softcapping"}));

INSTANTIATE_TEST_SUITE_P(
    Rope, Refuses,
    ::testing::Values(
        Refused{R"({"rope_scaling": {"type": "linear", "factor": 2}})",
                R"(rope_scaling.type: expected default or yarn, got "linear")"},
        Refused{R"({"rope_parameters": {"rope_type": "llama3", "factor": 2}})", "rope_parameters.rope_type"},
        Refused{R"({"rope_scaling": {"type": "yarn"}})",
                "rope_scaling.factor: expected a number of at least 1, got nothing"},
        Refused{R"({"rope_scaling": {"type": "yarn", "factor": 0.5}})", "rope_scaling.factor"},
        Refused{R"({"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 1}})",
                "mscale: expected mscale and mscale_all_dim together"},
        Refused{R"({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}})", "mscale_all_dim"},
        Refused{R"({"rope_scaling": {"type": "yarn", "factor": 4, "short_factor": [1]}})", "rope_scaling.short_factor"},
        Refused{R"({"rope_scaling": {"factor": 4}})",
                "rope_scaling.factor: expected no such key for rope type default"},
        Refused{R"({"rope_scaling": {"type": "yarn", "rope_type": "default"}})", "rope_scaling.type"},
        Refused{R"({"rope_scaling": "yarn"})", "rope_scaling: expected an object or null"},
        Refused{R"({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"rope_type": "default"}})",
                "rope_scaling: expected none beside rope_parameters"},
        Refused{R"({"rope_theta": 1})", "rope_theta"}, Refused{R"({"rope_freqs": [1]})", "rope_freqs"},
        Refused{R"({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})",
                "rope_parameters.partial_rotary_factor: expected 1, got 0.5"}));

INSTANTIATE_TEST_SUITE_P(
    Experts, Refuses,
    ::testing::Values(
        Refused{R"({"topk_method": "greedy"})", R"(topk_method: expected noaux_tc for deepseek_v3, got "greedy")"},
        Refused{R"({"scoring_func": "softmax"})", "scoring_func: expected sigmoid with topk_method noaux_tc"},
        Refused{R"({"n_group": 8})", "expected at least 2 experts a group"},
        Refused{R"({"n_routed_experts": 10})",
                "expected n_group to divide n_routed_experts, got n_routed_experts 10, n_group 4"},
        Refused{R"({"topk_group": 5})", "expected topk_group of at most n_group"},
        Refused{R"({"num_experts_per_tok": 5})", "num_experts_per_tok of at most the experts in the kept groups"},
        Refused{R"({"n_group": null})", "n_group: expected an integer"},
        Refused{R"({"n_routed_experts": 60000, "n_group": 1, "topk_group": 1, "num_hidden_layers": 60000})",
                "n_routed_experts: expected at most 1000000"},
        Refused{R"({"model_type": "youtu"})", "n_routed_experts: expected none for youtu"}));

TEST(ModelConfig, V2RefusesV3Gating) {
  EXPECT_THAT(refusal(kV2, R"({"topk_method": "noaux_tc"})"), HasSubstr("greedy or group_limited_greedy"));
  EXPECT_THAT(refusal(kV2, R"({"scoring_func": "sigmoid"})"), HasSubstr("expected softmax"));
  EXPECT_THAT(refusal(R"({"model_type": "deepseek_v2"})", "{}"), HasSubstr("num_experts_per_tok"));
}

// Errors stay one line of ASCII, whatever the file holds.
TEST(ModelConfig, HostileTextIsEscaped) {
  const std::string message = refusal(kV3, R"({"rope_\n\u001b[2J": "a\nb"})");
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

TEST(ModelConfig, ValidateNamesAllProblemsAtOnce) {
  ModelConfig c = parse(kV3);
  c.mla.dims.d_model = 0;
  c.mla.dims.d_rope = 5;
  c.moe->topk_group = 9;
  try {
    validate(c);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("hidden_size"), HasSubstr("got 5"), HasSubstr("topk_group 9")));
  }
}

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("parlat_config_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string data_error(const std::string& path) {
    try {
      load_model_config(path);
    } catch (const DataError& error) {
      return error.what();
    }
    return "accepted";
  }
  std::filesystem::path folder_;
};

TEST_F(Files, AFileOrItsFolder) {
  std::ofstream(folder_ / "config.json") << kV3;
  EXPECT_EQ(load_model_config(folder_.string()).mla.dims.d_model, 64);
  EXPECT_EQ(load_model_config((folder_ / "config.json").string()).mla.dims.d_model, 64);
}

TEST_F(Files, MissingBrokenOrNoObject) {
  EXPECT_THAT(data_error((folder_ / "none").string()), HasSubstr("no such file, and not a built-in model (v3, v2,"));
  EXPECT_THAT(data_error(folder_.string()), HasSubstr("config.json: no such file"));
  std::ofstream(folder_ / "config.json") << R"({"hidden_size": )";
  EXPECT_THAT(data_error(folder_.string()), HasSubstr("config.json: not JSON"));
  std::ofstream(folder_ / "config.json") << R"([{"hidden_size": 1}])";
  EXPECT_THAT(data_error(folder_.string()), HasSubstr("expected a JSON object, got array"));
  std::ofstream(folder_ / "config.json") << R"({"hidden_size": 1e999})";
  EXPECT_THAT(data_error(folder_.string()), HasSubstr("not JSON"));
}

// Read back, a written configuration is the same model.
TEST(ToHfJson, RoundTripsEveryBuiltinModel) {
  for (const std::string& model : builtin_model_names()) {
    SCOPED_TRACE(model);
    const ModelConfig c = load_model_config(model);
    const json written = to_hf_json(c);
    const ModelConfig again = parse_model_config(written, model);
    EXPECT_EQ(to_hf_json(again), written);
    EXPECT_DOUBLE_EQ(again.mla.softmax_scale(), c.mla.softmax_scale());
    EXPECT_EQ(again.mla.rope.theta, c.mla.rope.theta);
    EXPECT_EQ(again.mla.rope.beta_fast, c.mla.rope.beta_fast);
    EXPECT_EQ(again.mla.dims.d_q_latent, c.mla.dims.d_q_latent);
    EXPECT_EQ(again.tied_embeddings, c.tied_embeddings);
    EXPECT_EQ(again.moe.has_value(), c.moe.has_value());
    EXPECT_THAT(again.ignored_keys, IsEmpty());
  }
}

TEST(ToHfJson, KeepsOtherKeysAndNeedsNoFile) {
  EXPECT_EQ(to_hf_json(parse(kV3, R"({"my_note": "hello"})")).at("my_note"), "hello");
  ModelConfig made = parse(kV3, R"({"first_k_dense_replace": 3})");
  made.hf = nullptr;
  const ModelConfig again = parse_model_config(to_hf_json(made), "made");
  EXPECT_FALSE(again.moe.has_value());
  EXPECT_EQ(again.mla.dims.d_q_latent, 48);
}

TEST(BuiltinModels, HaveTheirPublicSizes) {
  EXPECT_EQ(load_model_config("k2").moe->n_routed, 384);
  EXPECT_EQ(load_model_config("k2").mla.dims.n_heads, 64);
  EXPECT_DOUBLE_EQ(load_model_config("moonlight").rms_norm_eps, 1e-5);
  EXPECT_DOUBLE_EQ(load_model_config("youtu").mla.rope.theta, 1.6e6);
  EXPECT_EQ(load_model_config("v2").moe->gating, Gating::kGroupLimitedGreedy);
  EXPECT_FALSE(load_model_config("v2-lite").mla.dims.d_q_latent.has_value());
  EXPECT_EQ(load_model_config("tiny").vocab_size, 257);
}

}  // namespace
}  // namespace parlat
