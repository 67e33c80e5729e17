// A run is the same run however it is spread over ranks, and however often it is stopped and resumed.
#include "parlat/train/trainer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <sstream>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/checkpoint.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/full_disk.h"
#include "tests/run_ranks.h"
#include "tests/temporary_folder.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSequence = 13;

// Documents of many lengths, so that most sequences are packed.
TrainingText small_text(const ModelConfig& config) {
  std::vector<std::vector<int64_t>> documents;
  for (int64_t d = 0; d < 24; ++d) {
    const Tensor tokens = seeded_integers({1 + 7 * d % 31}, config.vocab_size, 5, fmt::format("document {}", d));
    documents.emplace_back(tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + tokens.numel());
  }
  const PackedText all(documents, kSequence);
  return {all.subset({0, all.count() - 3}), all.subset({all.count() - 3, all.count()})};
}

struct Line {
  int64_t step = 0;
  double loss = 0, gradient_norm = 0, learning_rate = 0;
  bool operator==(const Line&) const = default;
};

void PrintTo(const Line& line, std::ostream* out) {
  *out << fmt::format("step {} loss {:.9g} norm {:.9g} lr {:.9g}", line.step, line.loss, line.gradient_norm,
                      line.learning_rate);
}

class TrainerTest : public ::testing::Test {
 protected:
  TrainSettings settings(const std::string& name, int64_t steps = 6) const {
    TrainSettings s;
    s.out = folder_ / name;
    s.batch = 4;
    s.accumulate = 2;
    s.steps = steps;
    s.learning_rate = {.schedule = Schedule::kCosine, .peak = 3e-3, .warmup = 2, .steps = 6};
    s.checkpoint_every = 2;
    s.quiet = true;
    return s;
  }
  static TrainSettings on(TrainSettings s, const ParallelSpec& parallel) {
    s.parallel = parallel;
    return s;
  }

  TrainResult run(const TrainSettings& settings, int64_t stop_after = 1000) const {
    TrainResult result;
    std::atomic<int64_t> asked = 0;
    run_ranks(static_cast<int>(settings.parallel.ranks()), [&](Communicator& world) {
      const bool last_rank = world.rank() == world.size() - 1;
      const auto stop = [&] { return last_rank && ++asked >= stop_after; };
      const TrainResult mine = train(settings, config_, text_, world, stop);
      if (world.rank() == 0) result = mine;
    });
    return result;
  }
  std::string error_of(const TrainSettings& settings, int exit_code) const {
    try {
      run(settings);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), exit_code) << error.what();
      return error.what();
    }
    return "no error";
  }

  static std::vector<nlohmann::json> records(const TrainSettings& settings) {
    std::vector<nlohmann::json> lines;
    std::istringstream file(read_file(settings.out / "metrics.jsonl"));
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  static std::vector<Line> lines(const TrainSettings& settings) {
    std::vector<Line> lines;
    for (const nlohmann::json& line : records(settings)) {
      if (line.contains("loss")) lines.push_back({line["step"], line["loss"], line["grad_norm"], line["lr"]});
    }
    return lines;
  }
  static std::vector<double> evaluations(const TrainSettings& settings) {
    std::vector<double> losses;
    for (const nlohmann::json& line : records(settings)) {
      if (line.contains("eval_loss")) losses.push_back(line["eval_loss"]);
    }
    return losses;
  }
  static void expect_near(const std::vector<Line>& got, const std::vector<Line>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i].loss, want[i].loss, 1e-6 * want[i].loss) << i;
  }

  // A model's folder with a NaN in one matrix.
  std::filesystem::path with_a_nan(const std::string& weight) const {
    std::filesystem::path folder = folder_ / ("nan in " + weight);
    ModelWeights weights;
    const std::vector<WeightRow> table = weight_table(config_, all_experts(config_), weights);
    initialize(table, config_, /*seed=*/1, at::kFloat);
    for (const WeightRow& row : table) {
      if (row.name == weight) (*row.tensor)[3][2] = NAN;
    }
    save_weights(folder, config_, table);
    return folder;
  }

  const TemporaryFolder folder_;
  ModelConfig config_ = small_model(/*experts=*/true);
  const TrainingText text_ = small_text(config_);
};

TEST_F(TrainerTest, LearnsAndRecordsEveryStep) {
  TrainSettings s = settings("run", 30);
  s.learning_rate.steps = 30;
  s.evaluate_every = 10;
  const TrainResult result = run(on(s, {.data = 1, .sequence = 2}));
  const std::vector<Line> steps = lines(s);
  ASSERT_EQ(steps.size(), 30u);
  EXPECT_GT(steps.front().loss, std::log(61.0) - 0.1);  // knows nothing yet
  EXPECT_LT(steps.back().loss, steps.front().loss - 0.3);
  EXPECT_EQ(evaluations(s).size(), 3u);
  EXPECT_EQ(result.evaluation_loss, evaluations(s).back());
  EXPECT_EQ(result.loss, steps.back().loss);
  const nlohmann::json last = records(s)[records(s).size() - 2];
  EXPECT_EQ(last["tokens"], 30 * 2 * 4 * kSequence);
  int64_t sent = 0;
  for (const auto& [kind, bytes] : last["sent_bytes"].items()) sent += kind == "total" ? 0 : bytes.get<int64_t>();
  EXPECT_EQ(last["sent_bytes"]["total"], sent);
  EXPECT_GT(sent, 0);
  EXPECT_GT(last["peak_bytes"], 0);
  EXPECT_GT(last["mfu"], 0.0);
  EXPECT_EQ(result.checkpoint.filename(), "step-000030");
}

TEST_F(TrainerTest, EveryMeshTakesTheSameSteps) {
  const TrainSettings one = settings("one");
  run(one);
  for (const ParallelSpec& parallel :
       {ParallelSpec{.sequence = 3}, ParallelSpec{.sequence = 4, .form = TrainForm::kExplicit},
        ParallelSpec{.data = 2, .sequence = 2, .expert = 2, .sharding = Sharding::kZigzag},
        ParallelSpec{.data = 4, .expert = 4, .form = TrainForm::kAbsorbed}}) {
    const TrainSettings many = on(settings(fmt::format("{}-{}", parallel.data, parallel.sequence)), parallel);
    SCOPED_TRACE(many.out.filename());
    run(many);
    expect_near(lines(many), lines(one));
    EXPECT_NEAR(evaluations(many).back(), evaluations(one).back(), 1e-6 * evaluations(one).back());
  }
}

TEST_F(TrainerTest, ResumesBitForBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string prefix(name(dtype));
    const ParallelSpec parallel{.data = 1, .sequence = 2, .expert = 2};
    TrainSettings whole = on(settings(prefix + "whole"), parallel), parts = on(settings(prefix + "parts"), parallel);
    whole.dtype = parts.dtype = dtype;
    run(whole);
    const TrainResult stopped = run(parts, 3);
    EXPECT_TRUE(stopped.interrupted);
    EXPECT_EQ(stopped.checkpoint.filename(), "step-000003");
    parts.resume = true;
    const TrainResult finished = run(parts);
    EXPECT_FALSE(finished.interrupted);
    EXPECT_EQ(finished.steps, 6);
    EXPECT_EQ(lines(parts), lines(whole));
    EXPECT_EQ(evaluations(parts), evaluations(whole));
  }
}

TEST_F(TrainerTest, DropsRecordsAfterTheCheckpoint) {
  const TrainSettings whole = settings("whole");
  run(whole);
  TrainSettings crashed = settings("crashed");
  run(crashed);
  for (const char* lost : {"step-000006", "step-000004"})
    std::filesystem::remove_all(crashed.out / "checkpoints" / lost);
  crashed.resume = true;
  run(crashed);
  EXPECT_EQ(lines(crashed), lines(whole));
}

TEST_F(TrainerTest, ResumesOnAnotherMesh) {
  const TrainSettings whole = settings("whole");
  run(whole);
  TrainSettings moved = on(settings("moved"), {.data = 2, .sequence = 1, .expert = 2});
  run(moved, 3);
  moved = on(moved, {.sequence = 3, .expert = 3, .form = TrainForm::kExplicit});
  moved.resume = true;
  run(moved);
  expect_near(lines(moved), lines(whole));
}

TEST_F(TrainerTest, ResumingAFinishedRunTakesNoStep) {
  TrainSettings s = settings("run");
  run(s);
  s.resume = true;
  const TrainResult result = run(s);
  EXPECT_EQ(result.steps, 6);
  EXPECT_EQ(result.loss, std::nullopt);
  EXPECT_EQ(lines(s).size(), 6u);
}

TEST_F(TrainerTest, DoesNotStartAgainOverDamagedCheckpoints) {
  TrainSettings s = settings("run", 2);
  std::filesystem::remove(run(s).checkpoint / Checkpoints::kOptimizerFile);
  s.resume = true;
  EXPECT_THAT(error_of(s, 3), HasSubstr("none of the checkpoints can be read"));
}

TEST_F(TrainerTest, RefusesAFolderInUse) {
  const TrainSettings s = settings("run");
  run(s);
  EXPECT_THAT(error_of(s, 2), HasSubstr("--resume"));
}

TEST_F(TrainerTest, RefusesToResumeAnotherRun) {
  TrainSettings s = settings("run");
  run(s, 2);
  s.resume = true;
  s.batch = 8;
  s.seed = 2;
  const std::string message = error_of(s, 2);
  EXPECT_THAT(message, HasSubstr("batch: checkpoint 4, now 8"));
  EXPECT_THAT(message, HasSubstr("seed: checkpoint 1, now 2"));
}

TEST_F(TrainerTest, SaysWhatChangesBitsWhenItResumes) {
  TrainSettings s = settings("run");
  s.parallel.attention = {.kernel = AttentionKernel::kEager};
  const std::filesystem::path state = run(s, 2).checkpoint / "state.json";
  s.resume = true;
  s.parallel.attention = {.save = SavedKeys::kAll, .ring_groups = 2};
  const nlohmann::json before = read_json(state).at("settings"), now = describe(s, config_, text_.training);
  ::testing::internal::CaptureStderr();
  require_same_run(before, now, "state.json");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("kernel: checkpoint \"eager\", now \"fused\""));
  EXPECT_THAT(said, HasSubstr("save: checkpoint \"latent\", now \"all\""));
  EXPECT_THAT(said, HasSubstr("ring_groups: checkpoint 0, now 2"));
}

// Before kernel, save and ring_groups were in them.
TEST_F(TrainerTest, ResumesFromOlderCheckpoints) {
  const TrainSettings s = settings("run");
  nlohmann::json before = describe(s, config_, text_.training);
  for (const char* key : {"kernel", "save", "ring_groups"}) ASSERT_EQ(before["changeable"].erase(key), 1u) << key;
  EXPECT_NO_THROW(require_same_run(before, describe(s, config_, text_.training), "state.json"));
}

// Before its weights are found not to fit.
TEST_F(TrainerTest, RefusesToResumeAnotherModel) {
  TrainSettings s = settings("run");
  run(s, 2);
  s.resume = true;
  config_.hf["intermediate_size"] = config_.d_mlp = 40;
  EXPECT_THAT(error_of(s, 2), HasSubstr("resume: the run differs from the checkpoint's: model/intermediate_size: "
                                        "checkpoint 48, now 40"));
}

TEST_F(TrainerTest, BrokenRecordsOfARunAreNamed) {
  TrainSettings s = settings("run", 2);
  const std::filesystem::path state = run(s).checkpoint / "state.json";
  s.resume = true;
  nlohmann::json json = read_json(state);
  for (const char* broken : {"null", "7", "{}", R"({"fixed": 7, "changeable": {"lr": 1}})"}) {
    json["settings"] = nlohmann::json::parse(broken);
    write_file_atomically(state, json.dump());
    EXPECT_THAT(error_of(s, 3), HasSubstr("step-000002: expected the settings of a run")) << broken;
  }
}

TEST_F(TrainerTest, LinesOfMetricsThatAreNoRecordsAreNamed) {
  TrainSettings s = settings("run", 2);
  run(s);
  s.resume = true;
  write_file_atomically(s.out / "metrics.jsonl", "{\"step\": \"one\"}\n7\n");
  EXPECT_THAT(error_of(s, 3), HasSubstr("metrics.jsonl: line 2: expected a JSON object, got number"));
}

TEST_F(TrainerTest, AFileIsNoFolder) {
  TrainSettings s = settings("run");
  s.out = folder_.write("file", "");
  EXPECT_THAT(error_of(s, 3), HasSubstr("/file: cannot be created: Not a directory"));
}

TEST_F(TrainerTest, TwoWritersOfOneFolderAreRefused) {
  const TrainSettings s = settings("run");
  create_folders(s.out);
  std::optional<FolderLock> other(s.out);
  EXPECT_THAT(error_of(s, 2), HasSubstr("run: expected a folder that no other run writes to"));
  other.reset();
  EXPECT_EQ(run(s).steps, 6);
}

TEST_F(TrainerTest, RefusesNumbersThatCannotBe) {
  const auto refused = [&](const auto& change) {
    TrainSettings s = settings("run");
    change(s);
    return error_of(s, 2);
  };
  EXPECT_THAT(refused([](auto& s) { s.learning_rate.peak = NAN; }), HasSubstr("lr: "));
  EXPECT_THAT(refused([](auto& s) { s.learning_rate.peak = INFINITY; }), HasSubstr("lr: "));
  EXPECT_THAT(refused([](auto& s) { s.learning_rate.minimum = -1; }), HasSubstr("min-lr: "));
  EXPECT_THAT(refused([](auto& s) { s.adamw.beta1 = 1; }), HasSubstr("beta1: "));
  EXPECT_THAT(refused([](auto& s) { s.adamw.beta2 = -0.1; }), HasSubstr("beta2: "));
  EXPECT_THAT(refused([](auto& s) { s.adamw.weight_decay = NAN; }), HasSubstr("weight-decay: "));
  EXPECT_THAT(refused([](auto& s) { s.adamw.clip = -1; }), HasSubstr("clip: "));
}

TEST_F(TrainerTest, RefusesBatchesThatDataRanksDoNotDivide) {
  EXPECT_THAT(error_of(on(settings("run"), {.data = 3}), 2), HasSubstr("multiple of the 3 data-parallel ranks, got 4"));
}

TEST_F(TrainerTest, RefusesTextsOfLessThanAStep) {
  TrainSettings s = settings("run", 1);
  s.batch = text_.training.count() / 2;
  EXPECT_EQ(run(s).steps, 1);
  s.out = folder_ / "more";
  for (const auto& [batch, accumulate] : {std::pair(s.batch + 1, int64_t{2}), std::pair(s.batch, int64_t{3}),
                                          std::pair(int64_t{1} << 62, int64_t{1} << 62)}) {
    s.batch = batch;
    s.accumulate = accumulate;
    EXPECT_THAT(error_of(s, 3), HasSubstr(fmt::format("(batch {} x accumulate {}), got {} of 13 tokens", batch,
                                                      accumulate, text_.training.count())));
  }
}

TEST_F(TrainerTest, AFullDiskLeavesThePreviousCheckpointGood) {
  const TrainSettings whole = settings("whole");
  run(whole);
  TrainSettings s = settings("full");
  run(s, 2);
  s.resume = true;
  {
    const FullDisk full(20'000);
    EXPECT_THAT(error_of(s, 3), HasSubstr("step-000004"));
  }
  EXPECT_EQ(Checkpoints(s.out / "checkpoints").newest()->step, 2);
  run(s);
  EXPECT_EQ(lines(s), lines(whole));
}

TEST_F(TrainerTest, NamesStepAndStageOfANaN) {
  for (const auto& [weight, stage] : {std::pair("model.layers.1.self_attn.o_proj.weight", "layer 1 attention"),
                                      std::pair("lm_head.weight", "head")}) {
    TrainSettings s = on(settings(stage), {.data = 2, .sequence = 2});
    s.init = with_a_nan(weight);
    EXPECT_EQ(error_of(s, 1), fmt::format("loss is nan at step 1; first non-finite activation: {}", stage));
  }
}

}  // namespace
}  // namespace parlat
