// What parlat writes, transformers reads: the same names, and the same logits.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "parlat/io/safetensors.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/model/fixture.h"
#include "tests/model/local_attention.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 23;

struct TemporaryFolder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("parlat_read_back_{}", ::getpid());
  TemporaryFolder() { std::filesystem::create_directories(path); }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
};

// New weights for the fixture's configuration, and the logits they give, in folder.
void write_model(const std::string& fixture, const std::filesystem::path& folder, int64_t max_shard_bytes) {
  const ModelConfig config = load_model_config((fixtures_folder() / fixture).string());
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  initialize(table, config, kSeed, at::kFloat);
  const Tensor tokens = seeded_integers({2, 11}, config.vocab_size, kSeed, "tokens");
  Tensor logits;
  run_ranks(1, [&](Communicator& comm) {
    const at::NoGradGuard no_grad;
    const LocalAttention attention;
    const Transformer model(config, weights, attention, comm);
    logits = model.logits(model.forward(tokens, whole_sequences(config, 2, 11)));
  });
  std::filesystem::create_directories(folder);
  save_weights(folder, config, table, max_shard_bytes);
  write_safetensors(folder / "expected.safetensors", {{"tokens", tokens}, {"logits", logits.contiguous()}});
}

TEST(ReadBack, TransformersComputesTheSameLogits) {
  const TemporaryFolder folder;
  const Tolerance rounding = Tolerance::rounding(at::kFloat, 64, 36 * 3);
  std::string command =
      fmt::format("{} {}/model/read_back.py {}", PARLAT_PYTHON, PARLAT_TESTS_DIR, rounding.relative_to_norm);
  for (const std::string& fixture : all_fixtures()) {
    const bool in_shards = fixture.starts_with("v2");
    write_model(fixture, folder.path / fixture, in_shards ? 40'000 : 5'000'000'000);
    EXPECT_EQ(std::filesystem::exists(folder.path / fixture / "model.safetensors.index.json"), in_shards);
    command.append(" ").append((folder.path / fixture).string());
  }
  EXPECT_EQ(std::system(command.c_str()), 0) << command;  // NOLINT(bugprone-command-processor): a fixed command
}

}  // namespace
}  // namespace parlat
