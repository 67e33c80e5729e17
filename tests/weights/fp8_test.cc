// Block-scaled fp8: widths that blocks do not divide, parts that begin within a block, scales of every kind.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/temporary_folder.h"
#include "tests/weights/small_model.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// kv_a_proj_with_mqa of 192 + 64 rows, q_b_proj of 4 * 192 rows, d_model 200: 128 divides none of the last.
nlohmann::json fp8_json() {
  return nlohmann::json::parse(R"({
    "model_type": "deepseek_v3", "hidden_size": 200, "num_attention_heads": 4, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 192, "q_lora_rank": 72, "num_hidden_layers": 1,
    "vocab_size": 40, "intermediate_size": 144, "n_routed_experts": null, "first_k_dense_replace": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]}})");
}

// A model in fp8, its routed experts fused.
struct Fp8Model {
  TemporaryFolder folder;
  ModelConfig config;
  at::ScalarType scale_dtype;
  std::map<std::string, Tensor> want;  // fp32, dequantised block by block
  NamedTensors stored;

  explicit Fp8Model(at::ScalarType scales, const nlohmann::json& json = fp8_json())
      : config(parse_model_config(json, "fp8")), scale_dtype(scales) {
    ModelWeights weights;
    for (const WeightRow& row : weight_table(config, {}, weights)) {
      if (row.name.ends_with("_proj.weight")) {
        want[row.name] = add(row.name, row.shape);
      } else {
        want[row.name] = seeded_normal(row.shape, 1.0, 3, row.name);
        stored.emplace_back(row.name, want[row.name]);
      }
    }
    for (int64_t layer = 0; layer < config.n_layers; ++layer) {
      if (config.is_moe_layer(layer)) add_experts(fmt::format("model.layers.{}.mlp.experts.", layer));
    }
  }

  void add_experts(const std::string& prefix) {
    const MoeSpec& moe = *config.moe;
    const int64_t d_model = config.mla.dims.d_model;
    const Tensor gate_up = add(prefix + "gate_up_proj", {moe.n_routed, 2 * moe.d_expert, d_model}),
                 down = add(prefix + "down_proj", {moe.n_routed, d_model, moe.d_expert});
    for (int64_t e = 0; e < moe.n_routed; ++e) {
      const std::string expert = fmt::format("{}{}.", prefix, e);
      want[expert + "gate_proj.weight"] = gate_up[e].narrow(0, 0, moe.d_expert);
      want[expert + "up_proj.weight"] = gate_up[e].narrow(0, moe.d_expert, moe.d_expert);
      want[expert + "down_proj.weight"] = down[e];
    }
  }

  // Stores [..., rows, columns] and the scales of its blocks; returns what they stand for.
  Tensor add(const std::string& name, const std::vector<int64_t>& shape) {
    const Tensor quantised = seeded_normal(shape, 1.0, 3, name).to(at::kFloat8_e4m3fn);
    std::vector<int64_t> blocks = shape;
    for (size_t i = shape.size() - 2; i < shape.size(); ++i) blocks[i] = (shape[i] + 127) / 128;
    // Powers of two, which every dtype holds.
    const Tensor scale = at::pow(2.0, seeded_integers(blocks, 9, 4, name) - 4).to(at::kFloat);
    Tensor whole = quantised.to(at::kFloat);
    for (int64_t r = 0; r < whole.size(-2); ++r) {
      for (int64_t c = 0; c < whole.size(-1); c += 128) {
        whole.select(-2, r)
            .narrow(-1, c, std::min<int64_t>(128, whole.size(-1) - c))
            .mul_(scale.select(-2, r / 128).narrow(-1, c / 128, 1));
      }
    }
    stored.emplace_back(name, quantised);
    stored.emplace_back(name + "_scale_inv", scale.to(scale_dtype));
    return whole;
  }

  void write() const { write_safetensors(folder / "model.safetensors", stored); }

  // Loads the whole of every tensor that a rank with these experts has, then parts that begin within blocks.
  void expect_loads(Range experts) const {
    ModelWeights weights;
    std::vector<WeightRow> table = weight_table(config, experts, weights);
    load_weights(folder.path(), config, table, at::kFloat);
    for (const WeightRow& row : table) EXPECT_TRUE(row.tensor->equal(want.at(row.name))) << row.name;

    for (const int64_t dimension : {0, 1}) {
      for (WeightRow& row : table) {
        const int64_t size = row.shape.size() == 2 ? row.shape[dimension] : 0;
        if (size == 0) continue;
        row.part = WeightPart{dimension, {size / 3, size - size / 5}};
      }
      load_weights(folder.path(), config, table, at::kFloat);
      for (const WeightRow& row : table) {
        const Tensor whole = want.at(row.name);
        EXPECT_TRUE(row.tensor->equal(row.part ? row.part->of(whole) : whole)) << row.name;
      }
    }
  }
};

std::string refusal(const Fp8Model& model) {
  model.write();
  try {
    check_weights(model.folder.path(), model.config);
  } catch (const DataError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Fp8, LoadsEveryPartWithItsBlocksScales) {
  for (const at::ScalarType scale : {at::kFloat, at::kBFloat16, at::kFloat8_e8m0fnu}) {
    const Fp8Model model(scale);
    model.write();
    model.expect_loads({});
  }
}

// Experts of 72 columns: the blocks of gate_up_proj's 144 rows begin at 0 and 128, up_proj at 72. Ranks with all of
// them, some, and none, who must know the names all the same.
TEST(Fp8, SplitsFusedExpertsWithTheirBlocksScales) {
  nlohmann::json json = fp8_json();
  json.update({{"n_routed_experts", 4},
               {"first_k_dense_replace", 0},
               {"moe_intermediate_size", 72},
               {"num_experts_per_tok", 2},
               {"n_group", 1},
               {"topk_group", 1}});
  for (const at::ScalarType scale : {at::kFloat, at::kFloat8_e8m0fnu}) {
    Fp8Model model(scale, json);
    model.write();
    for (const Range experts : {Range{0, 4}, Range{1, 3}, Range{4, 4}}) model.expect_loads(experts);

    const std::string last = "model.layers.0.mlp.experts.down_proj_scale_inv";
    ASSERT_EQ(model.stored.back().first, last);
    model.stored.back().second = at::ones({4, 1, 1});
    EXPECT_THAT(refusal(model), HasSubstr(last + ": expected [4, 2, 1] of fp32, bf16 or e8m0, got [4, 1, 1]"));
    model.stored.pop_back();
    EXPECT_THAT(refusal(model), AllOf(HasSubstr(last + ": missing"), Not(HasSubstr("problems"))));
  }
}

TEST(Fp8, RefusesMissingAndMisshapenScales) {
  const std::string name = "model.layers.0.self_attn.o_proj.weight_scale_inv";
  Fp8Model missing(at::kFloat), misshapen(at::kFloat), wrong(at::kFloat);
  std::erase_if(missing.stored, [&](const auto& entry) { return entry.first == name; });
  EXPECT_THAT(refusal(missing), HasSubstr(name + ": missing"));
  for (auto& [stored_name, tensor] : misshapen.stored) {
    if (stored_name == name) tensor = at::ones({2, 3});
  }
  EXPECT_THAT(refusal(misshapen), HasSubstr(name + ": expected [2, 4] of fp32, bf16 or e8m0, got [2, 3]"));
  wrong.config.fp8_block.reset();
  EXPECT_THAT(refusal(wrong), HasSubstr("expected fp32, bf16, fp16 or fp64, got Float8_e4m3fn"));
}

TEST(Fp8, TheConfigIsReadAndForgotten) {
  const ModelConfig config = parse_model_config(fp8_json(), "fp8");
  EXPECT_EQ(config.fp8_block, (std::array<int64_t, 2>{128, 128}));
  EXPECT_FALSE(to_hf_json(config).contains("quantization_config"));
  nlohmann::json other = fp8_json();
  other["quantization_config"]["quant_method"] = "gptq";
  EXPECT_THROW(parse_model_config(other, "other"), ConfigError);
  other = fp8_json();
  other["quantization_config"].erase("weight_block_size");
  EXPECT_THROW(parse_model_config(other, "other"), ConfigError);
}

}  // namespace
}  // namespace parlat
