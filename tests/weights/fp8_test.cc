// Block-scaled fp8: widths that blocks do not divide, parts that begin within a block, scales of every kind.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "parlat/weights/slice_maps.h"
#include "tests/temporary_folder.h"
#include "tests/weights/small_model.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

// kv_a_proj_with_mqa of 192 + 64 rows, q_b_proj of 4 * 192 rows, d_model 200: 128 divides none of the last.
nlohmann::json fp8_json() {
  return nlohmann::json::parse(R"({
    "model_type": "deepseek_v3", "hidden_size": 200, "num_attention_heads": 4, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 192, "q_lora_rank": 72, "num_hidden_layers": 1,
    "vocab_size": 40, "intermediate_size": 144, "n_routed_experts": null, "first_k_dense_replace": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]}})");
}

struct Fp8Model {
  TemporaryFolder folder;
  ModelConfig config = parse_model_config(fp8_json(), "fp8");
  std::map<std::string, Tensor> want;  // fp32, dequantised block by block
  NamedTensors stored;

  explicit Fp8Model(at::ScalarType scale_dtype) {
    ModelWeights weights;
    for (const WeightRow& row : weight_table(config, {}, weights)) {
      const Tensor values = seeded_normal(row.shape, 1.0, 3, row.name);
      if (!row.name.ends_with("_proj.weight")) {
        stored.emplace_back(row.name, values);
        want[row.name] = values;
        continue;
      }
      const Tensor quantised = values.to(at::kFloat8_e4m3fn);
      // Powers of two, which every dtype holds.
      const Tensor scale =
          at::pow(2.0, seeded_integers({(row.shape[0] + 127) / 128, (row.shape[1] + 127) / 128}, 9, 4, row.name) - 4)
              .to(at::kFloat);
      Tensor whole = quantised.to(at::kFloat);
      for (int64_t r = 0; r < row.shape[0]; ++r) {
        for (int64_t c = 0; c < row.shape[1]; c += 128) {
          whole[r].narrow(0, c, std::min<int64_t>(128, row.shape[1] - c)).mul_(scale[r / 128][c / 128]);
        }
      }
      stored.emplace_back(row.name, quantised);
      stored.emplace_back(row.name + "_scale_inv", scale.to(scale_dtype));
      want[row.name] = whole;
    }
  }
  void write() const { write_safetensors(folder / "model.safetensors", stored); }
};

TEST(Fp8, LoadsEveryPartWithItsBlocksScales) {
  for (const at::ScalarType scale : {at::kFloat, at::kBFloat16, at::kFloat8_e8m0fnu}) {
    const Fp8Model model(scale);
    model.write();
    ModelWeights weights;
    std::vector<WeightRow> table = weight_table(model.config, {}, weights);
    load_weights(model.folder.path(), model.config, table, at::kFloat);
    for (const WeightRow& row : table) EXPECT_TRUE(row.tensor->equal(model.want.at(row.name))) << row.name;

    for (const int64_t dimension : {0, 1}) {
      for (WeightRow& row : table) {
        const int64_t size = row.shape.size() == 2 ? row.shape[dimension] : 0;
        if (size == 0) continue;
        row.part = WeightPart{dimension, {size / 3, size - size / 5}};
      }
      load_weights(model.folder.path(), model.config, table, at::kFloat);
      for (const WeightRow& row : table) {
        const Tensor whole = model.want.at(row.name);
        EXPECT_TRUE(row.tensor->equal(row.part ? row.part->of(whole) : whole)) << row.name;
      }
    }
  }
}

TEST(Fp8, RefusesMissingAndMisshapenScales) {
  const auto refusal = [](Fp8Model& model) -> std::string {
    model.write();
    try {
      check_weights(model.folder.path(), model.config);
    } catch (const DataError& error) {
      return error.what();
    }
    return "accepted";
  };
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

TEST(SliceFile, RoundTripsAndRefusesOtherModels) {
  const ModelConfig config = small_model();
  const TemporaryFolder folder;
  SliceFile slices{.model = "", .transform = "test", .layers = {}};
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    slices.layers.push_back({plain_slice(16, 3, 0), plain_slice(16, 3, 1), plain_slice(16, 3, 2)});
  }
  const std::filesystem::path path = folder / slice_file_name(3);
  save_slices(path, slices);
  const SliceFile read = load_slices(path, config);
  EXPECT_EQ(read.groups(), 3);
  EXPECT_EQ(read.transform, "test");
  EXPECT_TRUE(read.layers[1][2].value_Lw.equal(slices.layers[1][2].value_Lw));
  Tensor sum = at::zeros({16, 16});
  for (const SliceMaps& slice : read.layers[0]) sum += at::matmul(slice.value_Lw, slice.store_Lw.t());
  EXPECT_TRUE(sum.equal(at::eye(16)));

  ModelConfig deeper = config, wider = config;
  deeper.n_layers = 3;
  wider.mla.dims.d_latent = 20;
  EXPECT_THROW(load_slices(path, deeper), DataError);
  EXPECT_THROW(load_slices(path, wider), DataError);
  write_safetensors(path, {{"x", at::ones({1})}});
  EXPECT_THROW(load_slices(path, config), DataError);
}

}  // namespace
}  // namespace parlat
