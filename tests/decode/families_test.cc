// Every family of checkpoints as the hub has it, and the fixtures: the decoder's logits are those of transformers.
#include <gmock/gmock.h>

#include <set>

#include "parlat/decode/decoder.h"
#include "parlat/io/safetensors.h"
#include "tests/expect_close.h"
#include "tests/model/fixture.h"
#include "tests/python_script.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::vector<std::filesystem::path> models_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> models;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_directory()) models.push_back(entry.path());
  }
  return models;
}

// The first half of every sequence prefilled exactly, then one token of each a step; [B, S, vocabulary].
Tensor decoded_logits(Decoder& decoder, const Tensor& tokens_BS) {
  const int64_t batch = tokens_BS.size(0), length = tokens_BS.size(1), prompt = length / 2;
  const auto token = [&](int64_t b, int64_t s) { return tokens_BS[b][s].item<int64_t>(); };
  std::vector<int64_t> slots;
  std::vector<Tensor> prompts;
  for (int64_t b = 0; b < batch; ++b) {
    Decoder::Prefill state{.slot = decoder.add_sequence(length), .done = 0, .latents = {}};
    std::vector<int64_t> text;
    for (int64_t s = 0; s < prompt; ++s) text.push_back(token(b, s));
    prompts.push_back(decoder.logits(decoder.prefill(state, text)));
    slots.push_back(state.slot);
  }
  std::vector<Tensor> logits = {at::stack(prompts)};
  for (int64_t s = prompt; s < length; ++s) {
    std::vector<TokenAt> rows;
    for (int64_t b = 0; b < batch; ++b) rows.push_back({slots[b], s, token(b, s)});
    logits.push_back(decoder.logits(decoder.forward(rows)).unsqueeze(1));
  }
  return at::cat(logits, 1);
}

// predicts: whether a multi-token-prediction layer lies in the file.
void expect_logits_of_transformers(const std::filesystem::path& folder, bool predicts) {
  const ModelConfig config = load_model_config(folder.string());
  const SafetensorsFile expected(folder / "expected.safetensors");
  // Products of at most 64 terms, a dozen of them in a row a layer.
  const Tolerance tolerance = Tolerance::rounding(at::kFloat, 64, 12 * config.n_layers);
  using enum DecodeLayout;
  for (const auto& [layout, ranks] : {std::pair{kMla, 1}, {kMla, 3}, {kDcp, 2}}) {
    SCOPED_TRACE(fmt::format("{}, {} on {}", folder.filename().string(), name(layout), ranks));
    run_ranks(ranks, [&, layout = layout](Communicator& comm) {
      ModelShard shard = load_model_shard({.directory = folder, .slices = {}, .seed = 1}, config, {layout, 1},
                                          comm.size(), comm.rank(), at::kFloat);
      if (predicts) {
        EXPECT_THAT(shard.skipped, Contains("model.layers.2.eh_proj.weight"));
        EXPECT_THAT(shard.skipped, Each(StartsWith("model.layers.2.")));
      } else {
        EXPECT_THAT(shard.skipped, IsEmpty());
      }
      Decoder decoder(std::move(shard), comm, {.cache_tokens = 512, .cache_dtype = at::kFloat, .slice_norm = false});
      decoder.cache().poison();
      EXPECT_CLOSE(decoded_logits(decoder, expected.tensor("tokens")), expected.tensor("logits"), tolerance);
    });
  }
}

TEST(Families, DecodeToTheLogitsOfTransformers) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_python(std::string(PARLAT_TESTS_DIR) + "/decode/families.py", {folder.path().string()}), "");
  std::set<std::string> types;
  for (const std::filesystem::path& model : models_in(folder.path())) {
    types.insert(load_model_config(model.string()).model_type);
    expect_logits_of_transformers(model, model.filename() == "deepseek_v3");
  }
  EXPECT_EQ(types, (std::set<std::string>{"deepseek_v2", "deepseek_v3", "kimi_k2", "youtu"}));
}

TEST(Families, FixturesDecodeToTheLogitsOfTransformers) {
  for (const std::filesystem::path& model : models_in(fixtures_folder())) {
    expect_logits_of_transformers(model, /*predicts=*/false);
  }
}

}  // namespace
}  // namespace parlat
