// Weights as files: round trips through every layout, and one message that lists everything wrong.
#include "parlat/weights/checkpoint_files.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "tests/full_disk.h"
#include "tests/temporary_folder.h"
#include "tests/weights/small_model.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Model {
  ModelConfig config;
  ModelWeights weights;
  std::vector<WeightRow> table;
  explicit Model(const ModelConfig& c) : Model(c, all_experts(c)) {}
  Model(const ModelConfig& c, Range experts) : config(c) { table = weight_table(config, experts, weights); }
};

// Initialised, with norms and biases that differ from each other too.
std::unique_ptr<Model> filled_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
  auto model = std::make_unique<Model>(config);
  initialize(model->table, config, 3, dtype);
  for (const WeightRow& row : model->table) {
    if (row.init != WeightRow::Init::kNormal) row.tensor->add_(seeded_normal(row.shape, 0.3, 3, row.name));
  }
  return model;
}

NamedTensors named_tensors(const Model& model) {
  NamedTensors tensors;
  for (const WeightRow& row : model.table) tensors.emplace_back(row.name, *row.tensor);
  return tensors;
}

void expect_equal(const Model& got, const Model& want) {
  std::map<std::string, Tensor> wanted;
  for (const WeightRow& row : want.table) wanted[row.name] = *row.tensor;
  for (const WeightRow& row : got.table) {
    EXPECT_TRUE(row.tensor->equal(wanted.at(row.name).to(row.tensor->scalar_type()))) << row.name;
  }
}

std::string load_error(const std::filesystem::path& folder, const ModelConfig& config) {
  Model model(config);
  try {
    load_weights(folder, config, model.table, at::kFloat);
  } catch (const DataError& error) {
    EXPECT_THROW(check_weights(folder, config), DataError);
    EXPECT_FALSE(model.weights.embedding.defined()) << "something was allocated before the check";
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "accepted";
}

TEST(Checkpoint, RoundTripsInOneFile) {
  for (const bool tied : {false, true}) {
    const TemporaryFolder folder;
    const auto saved = filled_model(small_model(tied));
    save_weights(folder.path(), saved->config, saved->table);
    EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors.index.json"));
    const ModelConfig config = load_model_config(folder.path().string());
    Model loaded(config);
    EXPECT_THAT(load_weights(folder.path(), config, loaded.table, at::kFloat), IsEmpty());
    expect_equal(loaded, *saved);
    EXPECT_EQ(loaded.weights.head.is_same(loaded.weights.embedding), tied);
  }
}

TEST(Checkpoint, RoundTripsInShards) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  save_weights(folder.path(), saved->config, saved->table, /*max_shard_bytes=*/8'000);
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  const auto index = read_json(folder / "model.safetensors.index.json");
  EXPECT_GT(std::set<std::string>(index.at("weight_map").begin(), index.at("weight_map").end()).size(), 3u);
  Model loaded(saved->config);
  EXPECT_THAT(load_weights(folder.path(), saved->config, loaded.table, at::kFloat), IsEmpty());
  expect_equal(loaded, *saved);
}

TEST(Checkpoint, ConvertsExceptWhatStaysFp32) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model(), at::kBFloat16);
  save_weights(folder.path(), saved->config, saved->table);
  EXPECT_EQ(read_json(folder / "config.json").at("torch_dtype"), "bfloat16");
  Model loaded(saved->config);
  load_weights(folder.path(), saved->config, loaded.table, at::kFloat);
  EXPECT_EQ(loaded.weights.embedding.scalar_type(), at::kFloat);
  expect_equal(loaded, *saved);
  load_weights(folder.path(), saved->config, loaded.table, at::kBFloat16);
  EXPECT_EQ(loaded.weights.layers[1].moe->w_router.scalar_type(), at::kBFloat16);
  EXPECT_EQ(loaded.weights.layers[1].moe->selection_bias.scalar_type(), at::kFloat);
}

TEST(Checkpoint, LoadedWeightsDoNotDependOnTheFile) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  save_weights(folder.path(), saved->config, saved->table);
  Model loaded(saved->config);
  load_weights(folder.path(), saved->config, loaded.table, at::kFloat);
  for (const WeightRow& row : loaded.table) row.tensor->zero_();  // read-only pages would end the process here
}

// A rank of an expert-parallel group reads its experts and knows the others.
TEST(Checkpoint, ExpertParallelRanksReadTheirOwn) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  save_weights(folder.path(), saved->config, saved->table);
  Model rank(saved->config, {2, 4});
  EXPECT_THAT(load_weights(folder.path(), saved->config, rank.table, at::kFloat), IsEmpty());
  expect_equal(rank, *saved);
  EXPECT_TRUE(rank.weights.layers[1].moe->experts[0].w_up.equal(saved->weights.layers[1].moe->experts[2].w_up));
}

TEST(Checkpoint, FusedExpertsAreSplit) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  NamedTensors tensors;
  for (auto& named : named_tensors(*saved)) {
    if (named.first.find(".experts.") == std::string::npos) tensors.push_back(named);
  }
  std::vector<Tensor> gate_up, down;
  for (const MlpWeights& expert : saved->weights.layers[1].moe->experts) {
    gate_up.push_back(at::cat({expert.w_gate, expert.w_up}));
    down.push_back(expert.w_down);
  }
  tensors.emplace_back("model.layers.1.mlp.experts.gate_up_proj", at::stack(gate_up));
  tensors.emplace_back("model.layers.1.mlp.experts.down_proj", at::stack(down));
  write_safetensors(folder / "model.safetensors", tensors);
  Model loaded(saved->config);
  EXPECT_THAT(load_weights(folder.path(), saved->config, loaded.table, at::kFloat), IsEmpty());
  expect_equal(loaded, *saved);

  tensors.back().second = at::zeros({4, 5, 6});
  write_safetensors(folder / "model.safetensors", tensors);
  const std::string error = load_error(folder.path(), saved->config);
  EXPECT_THAT(error, AllOf(HasSubstr("experts.down_proj: expected [4, 32, 16], got [4, 5, 6]"),
                           Not(HasSubstr("missing")), Not(HasSubstr("problems"))));
}

TEST(Checkpoint, WhatTheModelDoesNotNeedIsSkippedAndNamed) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model(/*tied=*/true));
  NamedTensors tensors = named_tensors(*saved);
  tensors.emplace_back("model.layers.2.eh_proj.weight", at::zeros({3}));  // a multi-token-prediction layer
  tensors.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq", at::zeros({2}));
  tensors.emplace_back("lm_head.weight", saved->weights.embedding);
  write_safetensors(folder / "model.safetensors", tensors);
  Model loaded(saved->config);
  EXPECT_THAT(
      load_weights(folder.path(), saved->config, loaded.table, at::kFloat),
      ElementsAre("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.eh_proj.weight"));
  expect_equal(loaded, *saved);
  EXPECT_EQ(check_weights(folder.path(), saved->config).size(), 3u);

  // A whole layer that the config does not count is not one of them.
  NamedTensors with_layer = tensors;
  with_layer.emplace_back("model.layers.3.input_layernorm.weight", at::zeros({3}));
  write_safetensors(folder / "model.safetensors", with_layer);
  EXPECT_THAT(load_error(folder.path(), saved->config),
              HasSubstr("model.layers.3.input_layernorm.weight: unexpected, in model.safetensors"));

  tensors.back().second = saved->weights.embedding + 1;
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_THAT(load_error(folder.path(), saved->config),
              HasSubstr("lm_head.weight: expected the embedding's values, since tie_word_embeddings is true"));
}

TEST(Checkpoint, AnUntiedHeadMayNotBeAbsent) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  NamedTensors tensors = named_tensors(*saved);
  ASSERT_EQ(tensors.back().first, "lm_head.weight");
  tensors.pop_back();
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_EQ(load_error(folder.path(), saved->config), folder.path().string() + ": lm_head.weight: missing");
}

TEST(Checkpoint, TextModelsWithinMultimodalOnes) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  NamedTensors tensors = named_tensors(*saved);
  for (auto& [name, tensor] : tensors) name.insert(0, "language_model.");
  tensors.emplace_back("vision_tower.patch.weight", at::zeros({3}));
  write_safetensors(folder / "model.safetensors", tensors);
  Model loaded(saved->config);
  EXPECT_THAT(load_weights(folder.path(), saved->config, loaded.table, at::kFloat),
              ElementsAre("vision_tower.patch.weight"));
  expect_equal(loaded, *saved);
}

TEST(Checkpoint, EveryBadTensorIsInOneMessage) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  NamedTensors tensors = named_tensors(*saved);
  for (auto& [name, tensor] : tensors) {
    if (name == "model.layers.0.self_attn.kv_b_proj.weight") tensor = at::zeros({64, 15});
    if (name == "model.layers.0.self_attn.o_proj.weight") name = "model.layers.0.self_attn.out_proj.weight";
    if (name == "model.norm.weight") tensor = at::zeros({32}, at::kInt);
    if (name == "model.layers.1.mlp.shared_experts.up_proj.weight")
      name = "model.layers.1.mlp.experts.9.up_proj.weight";
  }
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_THAT(
      load_error(folder.path(), saved->config),
      AllOf(
          HasSubstr(folder.path().string() + ": 6 problems: "),
          HasSubstr("model.layers.0.self_attn.kv_b_proj.weight: expected [64, 16], got [64, 15] in model.safetensors"),
          HasSubstr("model.layers.0.self_attn.o_proj.weight: missing"),
          HasSubstr("model.layers.0.self_attn.out_proj.weight: unexpected, in model.safetensors"),
          HasSubstr("model.norm.weight: expected fp32, bf16, fp16 or fp64, got Int"),
          HasSubstr("model.layers.1.mlp.shared_experts.up_proj.weight: missing"),
          HasSubstr("model.layers.1.mlp.experts.9.up_proj.weight: unexpected")));
}

TEST(Checkpoint, LongListsEndInACount) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  write_safetensors(folder / "model.safetensors", {{"model.norm.weight", at::ones({32})}});
  const std::string error = load_error(folder.path(), saved->config);
  const size_t problems = saved->table.size() - 1;
  EXPECT_THAT(error, AllOf(HasSubstr(fmt::format("{} problems: ", problems)),
                           HasSubstr(fmt::format("; and {} more", problems - 20))));
}

TEST(Checkpoint, NoWeightsAtAll) {
  const TemporaryFolder folder;
  EXPECT_THAT(load_error(folder.path(), small_model()),
              HasSubstr("expected model.safetensors or model.safetensors.index.json, got neither"));
}

TEST(Checkpoint, ATruncatedFileIsNamedAndNothingElse) {
  const TemporaryFolder folder;
  const auto saved = filled_model(small_model());
  save_weights(folder.path(), saved->config, saved->table);
  const std::string bytes = read_file(folder / "model.safetensors");
  folder.write("model.safetensors", bytes.substr(0, bytes.size() - 1024));
  EXPECT_THAT(load_error(folder.path(), saved->config),
              AllOf(HasSubstr("model.safetensors: expected "), HasSubstr("cut short"), Not(HasSubstr("missing"))));
}

class Shards : public ::testing::Test {
 protected:
  Shards() : saved_(filled_model(small_model())) {
    save_weights(folder_.path(), saved_->config, saved_->table, /*max_shard_bytes=*/8'000);
    index_ = read_json(folder_ / "model.safetensors.index.json");
    second_ = index_.at("weight_map").at("model.layers.0.self_attn.o_proj.weight");
  }
  std::string error() {
    folder_.write("model.safetensors.index.json", index_.dump());
    return load_error(folder_.path(), saved_->config);
  }
  TemporaryFolder folder_;
  std::unique_ptr<Model> saved_;
  nlohmann::json index_;
  std::string second_;
};

TEST_F(Shards, AMissingOneIsNamedAndNothingElse) {
  std::filesystem::remove(folder_ / second_);
  EXPECT_EQ(error(),
            fmt::format("{}: {}: cannot be opened: No such file or directory", folder_.path().string(), second_));
}

TEST_F(Shards, ATruncatedOneIsNamed) {
  const std::string bytes = read_file(folder_ / second_);
  folder_.write(second_, bytes.substr(0, bytes.size() - 1024));
  EXPECT_THAT(error(), AllOf(HasSubstr(second_), HasSubstr("cut short"), Not(HasSubstr("problems"))));
}

TEST_F(Shards, TheIndexMustAgree) {
  auto& map = index_.at("weight_map");
  map["model.norm.weight"] = second_;
  map.erase("model.layers.0.post_attention_layernorm.weight");
  map["model.layers.7.extra"] = second_;
  EXPECT_THAT(
      error(),
      AllOf(HasSubstr("3 problems"), HasSubstr("model.norm.weight: expected in " + second_),
            HasSubstr("model.layers.0.post_attention_layernorm.weight: in " + second_ + " but not in the index"),
            HasSubstr("model.layers.7.extra: expected in " + second_ + ", as the index says, got none there")));
}

TEST_F(Shards, TheSameTensorTwice) {
  write_safetensors(folder_ / "again.safetensors", {{"model.norm.weight", at::ones({32})}, {"x", at::ones({1})}});
  index_.at("weight_map")["x"] = "again.safetensors";
  EXPECT_THAT(error(), AllOf(HasSubstr("model.norm.weight: in again.safetensors and again in model-"),
                             HasSubstr("x: unexpected, in again.safetensors")));
}

TEST_F(Shards, TheIndexStaysInItsFolder) {
  index_.at("weight_map")["model.norm.weight"] = "../model-00001-of-00002.safetensors";
  EXPECT_THAT(error(), HasSubstr("model.norm.weight: expected a file name in the index, got \"../model-"));
  index_.at("weight_map")["model.norm.weight"] = std::string("b\0c", 3);  // to a system: b
  EXPECT_THAT(error(), HasSubstr("model.norm.weight: expected a file name in the index, got \"b\\u0000c\""));
  index_.at("weight_map")["model.norm.weight"] = "b";
  index_.at("weight_map")[std::string("x\0y", 3)] = second_;
  EXPECT_THAT(error(), HasSubstr("x\\x00y: expected in " + second_ + ", as the index says"));
  index_.at("weight_map") = 7;
  EXPECT_THAT(error(), HasSubstr("expected an object weight_map"));
}

TEST_F(Shards, AFullDiskLeavesTheEarlierSave) {
  {
    const auto other = filled_model(small_model(), at::kDouble);
    const FullDisk full(12'000);
    EXPECT_THROW(save_weights(folder_.path(), other->config, other->table, 12'000), DataError);
  }
  Model loaded(saved_->config);
  load_weights(folder_.path(), saved_->config, loaded.table, at::kFloat);
  expect_equal(loaded, *saved_);
  for (const auto& file : std::filesystem::directory_iterator(folder_.path())) {
    EXPECT_NE(file.path().extension(), ".tmp") << file.path();
  }
}

// One file where there were shards, and shards where there was one: readers must not find the old beside the new.
TEST_F(Shards, AnotherSaveReplacesAllFiles) {
  const auto other = filled_model(small_model(/*tied=*/true));
  save_weights(folder_.path(), other->config, other->table);
  size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_.path())) files += file.is_regular_file();
  EXPECT_EQ(files, 2u);  // model.safetensors and config.json
  save_weights(folder_.path(), saved_->config, saved_->table, 8'000);
  Model loaded(saved_->config);
  load_weights(folder_.path(), saved_->config, loaded.table, at::kFloat);
  expect_equal(loaded, *saved_);
}

}  // namespace
}  // namespace parlat
