// A checkpoint is there whole or not at all, whatever goes wrong while it is written.
#include "parlat/train/checkpoint.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/temporary_folder.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

namespace fs = std::filesystem;

void write_files(const fs::path& folder) {
  const ModelConfig config = small_model(/*experts=*/true);
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  initialize(table, config, /*seed=*/1, at::kFloat);
  save_weights(folder, config, table);
  write_safetensors(folder / Checkpoints::kOptimizerFile, {{"weight.master", at::ones({8})}});
}

class CheckpointsTest : public ::testing::Test {
 protected:
  fs::path save(int64_t step, int64_t keep = 2) {
    return Checkpoints(folder_.path(), keep).save(step, {{"step", step}}, write_files);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  int64_t newest_step() const {
    const auto newest = Checkpoints(folder_.path()).newest();
    return newest ? newest->step : -1;
  }
  TemporaryFolder folder_;
};

TEST_F(CheckpointsTest, KeepsTheNewest) {
  EXPECT_FALSE(Checkpoints(folder_.path()).any());
  EXPECT_EQ(newest_step(), -1);
  for (const int64_t step : {5, 10, 100, 1234567}) save(step);
  EXPECT_THAT(names(), ::testing::ElementsAre("step-000100", "step-1234567"));
  EXPECT_EQ(newest_step(), 1234567);
}

TEST_F(CheckpointsTest, PassesOverDamagedOnes) {
  save(5, 3);
  save(6, 3);
  const fs::path cut = save(7, 3) / "model.safetensors";
  fs::resize_file(cut, fs::file_size(cut) - 1);
  EXPECT_EQ(newest_step(), 6);
  fs::remove(folder_.path() / "step-000006" / Checkpoints::kOptimizerFile);
  EXPECT_EQ(newest_step(), 5);
  std::ofstream(folder_.path() / "step-000005" / "state.json") << "{\"step\": 4}";
  EXPECT_EQ(newest_step(), -1);
}

TEST_F(CheckpointsTest, PassesOverThoseWithoutAllWeights) {
  for (const int64_t step : {5, 6, 7, 8}) save(step, 4);
  fs::remove(folder_.path() / "step-000008" / "model.safetensors");
  write_safetensors(folder_.path() / "step-000007" / "model.safetensors", {{"model.norm.weight", at::ones({32})}});
  write_file_atomically(folder_.path() / "step-000006" / "config.json", "{}");
  EXPECT_EQ(newest_step(), 5);
}

// Else the checkpoint just written could be the one that is one too many.
TEST_F(CheckpointsTest, DamagedOnesOfLaterStepsDoNotCount) {
  save(5, 3);
  for (const int64_t step : {10, 11}) fs::remove(save(step, 3) / "state.json");
  save(6, 1);
  EXPECT_THAT(names(), ::testing::ElementsAre("step-000006"));
  EXPECT_EQ(newest_step(), 6);
}

TEST_F(CheckpointsTest, LeavesFoldersOfOtherNamesAlone) {
  for (const char* name : {"step-200", "step-", "step-7x", "step-99999999999999999999"}) {
    fs::create_directory(folder_.path() / name);
  }
  save(5, 1);
  save(6, 1);
  EXPECT_EQ(newest_step(), 6);
  EXPECT_EQ(names().size(), 5u);
}

TEST_F(CheckpointsTest, ReplacesADamagedOneOfTheSameStep) {
  save(5);
  fs::remove(save(6) / "state.json");
  save(6);
  EXPECT_EQ(newest_step(), 6);
  EXPECT_THAT(names(), ::testing::ElementsAre("step-000005", "step-000006"));
}

TEST_F(CheckpointsTest, AFailedOneLeavesThePreviousAsItWas) {
  save(5, 1);
  const auto fails = [](const fs::path& folder) {
    write_files(folder);
    throw DataError("no space left");
  };
  EXPECT_THROW(Checkpoints(folder_.path(), 1).save(6, {{"step", 6}}, fails), DataError);
  EXPECT_EQ(newest_step(), 5);
  save(7, 1);  // and what it left goes
  EXPECT_THAT(names(), ::testing::ElementsAre("step-000007"));
}

TEST_F(CheckpointsTest, SaysWhyAFolderCannotBeWritten) {
  folder_.write("file", "");
  try {
    Checkpoints(folder_.path() / "file").save(1, {{"step", 1}}, write_files);
    FAIL() << "expected DataError";
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/file: cannot be created: Not a directory"));
  }
}

}  // namespace
}  // namespace parlat
