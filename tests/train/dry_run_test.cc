// One step without values against the meter of a real one.
#include "parlat/train/dry_run.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/sharded_model.h"
#include "tests/form_name.h"
#include "tests/run_ranks.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

using ::testing::StartsWith;

constexpr int64_t kSequence = 256;

TrainSettings settings_on(const ParallelSpec& parallel, at::ScalarType dtype) {
  TrainSettings settings;
  settings.parallel = parallel;
  settings.batch = 2;
  settings.accumulate = 2;
  settings.steps = 1;
  settings.dtype = dtype;
  settings.quiet = true;
  return settings;
}

// Of the rank with most.
template <typename Step>
DryRun largest(const TrainSettings& settings, const Step& step) {
  DryRun most;
  std::mutex mutex;
  run_ranks(static_cast<int>(settings.parallel.ranks()), [&](Communicator& world) {
    const DryRun mine = step(world);
    const std::lock_guard lock(mutex);
    if (mine.peak_bytes > most.peak_bytes) most = mine;
  });
  return most;
}

DryRun dry(const TrainSettings& settings, const ModelConfig& config) {
  return largest(settings, [&](Communicator& world) { return dry_run_step(settings, config, kSequence, world); });
}

DryRun measured(const TrainSettings& settings, const ModelConfig& config) {
  return largest(settings, [&](Communicator& world) {
    MemoryMeter meter(/*with_sites=*/true);
    const MemoryMeter::Scope scope(meter);
    const Mesh mesh = make_mesh(settings.parallel, config, world);
    ShardedModel model(config, mesh, {}, settings.seed, settings.dtype);
    ShardedAdamW optimizer(settings.adamw, model.groups(), world);
    const Traffic before = world.traffic();
    const int64_t sequences = settings.batch / settings.parallel.data;
    const Tensor tokens = seeded_integers({sequences, kSequence}, config.vocab_size, 5, "tokens");
    const Batch batch{tokens, tokens, Documents::whole(sequences, kSequence)};
    for (int64_t micro = 0; micro < settings.accumulate; ++micro) model.loss_sum(batch).backward();
    optimizer.step(1e-3);
    return DryRun{meter.peak_bytes(), meter.peak_sites(), world.traffic() - before};
  });
}

// Real tokens are no even share for each expert: a mixture is close, no more.
TEST(TrainDryRun, PredictsThePeakOfAStep) {
  for (const bool experts : {false, true}) {
    const ModelConfig config = small_model(experts);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const ParallelSpec& parallel : {ParallelSpec{}, ParallelSpec{.sequence = 2},
                                           ParallelSpec{.data = 2, .sequence = 2, .expert = experts ? 2 : 1}}) {
        SCOPED_TRACE(fmt::format("{} ranks, {}, experts {}", parallel.ranks(), name(dtype), experts));
        const TrainSettings settings = settings_on(parallel, dtype);
        const DryRun real = measured(settings, config);
        const auto want = static_cast<double>(real.peak_bytes);
        const DryRun run = dry(settings, config);
        EXPECT_NEAR(static_cast<double>(run.peak_bytes), want, (experts ? 0.05 : 0.01) * want);
        int64_t sum = 0;
        for (const MemoryMeter::Site& site : run.peak_sites) sum += site.bytes;
        EXPECT_EQ(sum, run.peak_bytes);
        EXPECT_TRUE(experts || run.sent.bytes() == real.sent.bytes());
      }
    }
  }
}

TEST(TrainDryRun, RunsDeepSeekV3) {
  ModelConfig config = load_model_config("v3");
  config.n_layers = 5;  // of which two are mixtures
  const TrainSettings settings = settings_on({.sequence = 8, .expert = 8}, at::kBFloat16);
  const DryRun run = dry(settings, config);
  const int64_t local_experts = int64_t{2} * 256 / 8 * 3 * 7168 * 2048;
  EXPECT_GT(run.peak_bytes, (2 + 4) * local_experts);  // weights and gradients alone
}

TEST(TrainDryRun, RefusesWhatTrainingRefuses) {
  TrainSettings settings = settings_on({.sequence = 2}, at::kFloat);
  settings.batch = 0;
  EXPECT_THROW(dry(settings, small_model(false)), ConfigError);
}

// Without values there are still positions.
TEST(TrainDryRun, RefusesMoreTokensThanThereIsMemoryForPositions) {
  const TrainSettings settings = settings_on({.data = 2, .sequence = 2}, at::kFloat);
  run_ranks(4, [&](Communicator& world) {
    try {
      dry_run_step(settings, small_model(false), int64_t{1} << 44, world);
      FAIL() << "expected a ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), StartsWith("sequence: expected the positions of all tokens to fit in "));
    }
  });
}

}  // namespace
}  // namespace parlat
