// What broke other systems when a whole model is trained over ranks: masks that differ between ranks, meshes of data
// and sequence ranks, experts on other ranks. Through the trainer: the loss is the mean over the unmasked tokens of all
// ranks, gradients are sums.
#include <gmock/gmock.h>

#include <map>

#include "parlat/base/error.h"
#include "parlat/io/safetensors.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/checkpoint.h"
#include "parlat/train/trainer.h"
#include "tests/expect_close.h"
#include "tests/form_name.h"
#include "tests/run_ranks.h"
#include "tests/temporary_folder.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 7;
constexpr int64_t kSequence = 16, kBatch = 2;

struct ModelCase {
  ModelConfig config;
  PackedText text;  // one batch
};

// The last token of a document has no target: one alone is masked.
ModelCase make_model_case(const std::vector<int64_t>& document_lengths, bool experts = false) {
  const ModelConfig config = small_model(experts);
  std::vector<std::vector<int64_t>> documents;
  for (const int64_t length : document_lengths) {
    const Tensor tokens =
        seeded_integers({length}, config.vocab_size, kSeed, fmt::format("document {}", documents.size()));
    documents.emplace_back(tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + length);
  }
  const PackedText text(documents, kSequence);
  PARLAT_ASSERT(text.count() == kBatch, "{} sequences", text.count());
  return {config, text};
}

std::vector<int64_t> lengths(const std::vector<std::pair<int64_t, int64_t>>& times_length) {
  std::vector<int64_t> all;
  for (const auto& [times, length] : times_length) all.insert(all.end(), times, length);
  return all;
}

struct ModelResult {
  double loss = 0;
  std::map<std::string, Tensor> gradients;
};

// One step. AdamW without memory keeps the gradient as its first moment.
ModelResult run_model(const ModelCase& c, const ParallelSpec& spec) {
  const TemporaryFolder folder;
  TrainSettings settings;
  settings.out = folder / "run";
  settings.parallel = spec;
  settings.batch = kBatch;
  settings.steps = 1;
  settings.adamw.beta1 = 0;
  settings.adamw.clip = 0;
  settings.seed = kSeed;
  settings.quiet = true;
  TrainResult trained;
  run_ranks(static_cast<int>(spec.ranks()), [&](Communicator& world) {
    const TrainResult mine = train(settings, c.config, {c.text, std::nullopt}, world, [] { return false; });
    if (world.rank() == 0) trained = mine;
  });
  ModelResult result{.loss = *trained.loss, .gradients = {}};
  const SafetensorsFile state(trained.checkpoint / Checkpoints::kOptimizerFile);
  const std::string first_moment = ".exp_avg";
  for (const auto& [name, entry] : state.entries()) {
    if (name.ends_with(first_moment)) result.gradients[name] = state.tensor(name).clone();
  }
  return result;
}

void expect_same(const ModelResult& got, const ModelResult& want) {
  const Tolerance rounding = Tolerance::rounding(at::kFloat, 64, 24);  // two layers, forwards and backwards
  ASSERT_TRUE(std::isfinite(got.loss));
  EXPECT_NEAR(got.loss, want.loss, rounding.relative_to_norm * want.loss);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    EXPECT_CLOSE(got.gradients.at(name), gradient, rounding) << name;
  }
}

class ModelCases : public ::testing::TestWithParam<TrainForm> {
 protected:
  static ParallelSpec split(int64_t data, int64_t sequence, int64_t expert = 1) {
    return {.data = data, .sequence = sequence, .expert = expert, .form = GetParam()};
  }
};

// A gradient scaled by 1/P because each rank averaged its own tokens.
TEST_P(ModelCases, OneUnmaskedToken) {
  const ModelCase c = make_model_case(lengths({{25, 1}, {1, 2}, {5, 1}}));
  const ModelResult want = run_model(c, split(1, 1));
  EXPECT_NEAR(want.loss, std::log(61.0), 2) << "of one token, not its share of 32";
  expect_same(run_model(c, split(1, 2)), want);
  expect_same(run_model(c, split(1, 4)), want);
  expect_same(run_model(c, split(2, 2)), want);
}

// Tokens counted over the data-parallel ranks only.
TEST_P(ModelCases, DataBySequenceMesh) {
  const ModelCase c = make_model_case(lengths({{13, 1}, {1, 3}, {1, 16}}));
  const ModelResult want = run_model(c, split(1, 1));
  for (const auto& [data, sequence] : {std::pair<int64_t, int64_t>{2, 1}, {2, 2}, {1, 4}, {2, 4}}) {
    SCOPED_TRACE(fmt::format("data {} sequence {}", data, sequence));
    expect_same(run_model(c, split(data, sequence)), want);
  }
}

// A rank without a valid label.
TEST_P(ModelCases, AllTargetsOnOneRank) {
  const ModelCase c = make_model_case(lengths({{8, 1}, {1, 8}, {8, 1}, {1, 8}}));
  expect_same(run_model(c, split(1, 2)), run_model(c, split(1, 1)));
}

TEST_P(ModelCases, ExpertParallelismComposes) {
  const ModelCase c = make_model_case({16, 16}, /*experts=*/true);
  const ModelResult want = run_model(c, split(1, 1));
  for (const auto& [data, sequence, expert] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 2, 2}, {1, 4, 2}, {2, 2, 4}, {1, 3, 3}}) {
    SCOPED_TRACE(fmt::format("data {} sequence {} expert {}", data, sequence, expert));
    expect_same(run_model(c, split(data, sequence, expert)), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, ModelCases, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace parlat
