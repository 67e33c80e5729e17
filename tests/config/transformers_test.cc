// transformers, given the same file, resolves the same model: defaults of absent keys, rope and softmax scale, and what
// to_hf_json writes. One process for all files, since importing transformers takes longest.
#include <gtest/gtest.h>

#include <fstream>

#include "parlat/base/error.h"
#include "parlat/config/model_config.h"
#include "tests/python_script.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

using nlohmann::json;

// What parlat holds, under transformers' names; keys that the model's class lacks are not compared.
json resolved(const ModelConfig& c) {
  const MlaDims& d = c.mla.dims;
  json keys = {{"vocab_size", c.vocab_size},
               {"hidden_size", d.d_model},
               {"intermediate_size", c.d_mlp},
               {"num_hidden_layers", c.n_layers},
               {"num_attention_heads", d.n_heads},
               {"kv_lora_rank", d.d_latent},
               {"q_lora_rank", d.d_q_latent ? json(*d.d_q_latent) : json()},
               {"qk_nope_head_dim", d.d_nope},
               {"qk_rope_head_dim", d.d_rope},
               {"v_head_dim", d.d_v},
               {"rms_norm_eps", c.rms_norm_eps},
               {"tie_word_embeddings", c.tied_embeddings},
               {"max_position_embeddings", c.max_positions},
               {"initializer_range", c.initializer_range},
               {"rope_interleave", c.mla.rope.interleaved}};
  if (c.embedding_initializer_range) keys["embedding_initializer_range"] = *c.embedding_initializer_range;
  if (!c.moe) return keys;
  const MoeSpec& moe = *c.moe;
  keys.update({{"n_routed_experts", moe.n_routed},
               {"n_shared_experts", moe.n_shared},
               {"num_experts_per_tok", moe.experts_per_token},
               {"moe_intermediate_size", moe.d_expert},
               {"first_k_dense_replace", moe.first_dense},
               {"norm_topk_prob", moe.norm_topk_prob},
               {"routed_scaling_factor", moe.routed_scaling_factor}});
  if (moe.gating != Gating::kGreedy) keys.update({{"n_group", moe.n_group}, {"topk_group", moe.topk_group}});
  return keys;
}

void expect_same_model(const ModelConfig& got, const json& want) {
  const json keys = resolved(got);
  for (const auto& [key, value] : want.at("keys").items()) {
    if (keys.contains(key)) {
      EXPECT_EQ(keys.at(key), value) << key;
    }
  }
  const auto frequencies = inverse_frequencies(got.mla.rope, got.mla.dims.d_rope);
  const auto want_frequencies = want.at("inverse_frequencies").get<std::vector<double>>();
  ASSERT_EQ(frequencies.size(), want_frequencies.size());
  RopeSpec plain = got.mla.rope;
  plain.type = RopeSpec::Type::kDefault;
  const auto scale = inverse_frequencies(plain, got.mla.dims.d_rope);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    // transformers computes in fp32: a power, and a ramp whose complement cancels.
    EXPECT_NEAR(frequencies[i], want_frequencies[i], 8 * 0x1p-24 * scale[i]) << i;
  }
  EXPECT_NEAR(rope_amplitude(got.mla.rope), want.at("amplitude").get<double>(), 1e-15);
  EXPECT_NEAR(got.mla.softmax_scale(), want.at("softmax_scale").get<double>(), 1e-15);
}

TEST(Transformers, ResolvesTheSameModels) {
  std::map<std::string, json> files;
  for (const std::string& name : builtin_model_names()) files[name] = to_hf_json(load_model_config(name));
  files["v3-defaults"] = {{"model_type", "deepseek_v3"}};
  files["v2-defaults"] = {{"model_type", "deepseek_v2"}, {"num_experts_per_tok", 6}};
  files["youtu-defaults"] = {{"model_type", "youtu"}};
  files["theta-outside"] = {{"model_type", "deepseek_v3"}, {"rope_theta", 7000}, {"rope_scaling", nullptr}};
  files["theta-twice"] = {{"model_type", "youtu"},
                          {"rope_theta", 7000},
                          {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 9000}}}};
  files["yarn-few-keys"] = {{"model_type", "deepseek_v3"},
                            {"max_position_embeddings", 256},
                            {"rope_scaling", {{"type", "yarn"}, {"factor", 4}}}};
  files["yarn-null-factor"] = {
      {"model_type", "deepseek_v3"},
      {"max_position_embeddings", 8192},
      {"rope_parameters", {{"rope_type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 512}}}};
  files["yarn-two-mscales"] = {{"model_type", "deepseek_v2"},
                               {"num_experts_per_tok", 6},
                               {"rope_scaling",
                                {{"type", "yarn"},
                                 {"factor", 40},
                                 {"mscale", 1},
                                 {"mscale_all_dim", 0.5},
                                 {"truncate", false},
                                 {"original_max_position_embeddings", 64}}}};
  const TemporaryFolder folder, results;
  for (const auto& [name, file] : files) folder.write(name + ".json", file.dump());
  const auto out = results / "resolved.json";
  const std::string script = std::string(PARLAT_TESTS_DIR) + "/config/resolve.py";
  ASSERT_EQ(run_python(script, {folder.path().string(), out.string()}), "");
  const json resolved_files = json::parse(std::ifstream(out));
  for (const auto& [name, file] : files) {
    SCOPED_TRACE(name);
    expect_same_model(parse_model_config(file, name), resolved_files.at(name));
  }
}

}  // namespace
}  // namespace parlat
