// A checkpoint is there whole or not at all, whatever goes wrong while it is written.
#include "parlat/train/checkpoint.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/io/checksum.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/temporary_folder.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

void write_files(const fs::path& folder, uint64_t seed) {
  const ModelConfig config = small_model(/*experts=*/true);
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  initialize(table, config, seed, at::kFloat);
  save_weights(folder, config, table);
  write_safetensors(folder / Checkpoints::kOptimizerFile, {{"weight.master", at::ones({8})}});
}

void write_first(const fs::path& folder) { write_files(folder, /*seed=*/1); }

class CheckpointsTest : public ::testing::Test {
 protected:
  fs::path save(int64_t step, int64_t keep = 2) {
    return Checkpoints(folder_.path(), keep).save(step, {{"step", step}}, write_first);
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
  std::string newest_error() const {
    try {
      return fmt::format("no error, but step {}", newest_step());
    } catch (const DataError& error) {
      return error.what();
    }
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
  EXPECT_THAT(newest_error(), AllOf(HasSubstr("none of the checkpoints can be read"),
                                    HasSubstr("step-000007/model.safetensors: expected {\"bytes\":"),
                                    HasSubstr("step-000006/optimizer.safetensors: cannot be opened"),
                                    HasSubstr("step-000005/state.json: expected step 5, got 4")));
}

TEST_F(CheckpointsTest, NoticesOneChangedByteOfAnyFile) {
  const fs::path folder = save(5);
  for (const char* name : {"config.json", "model.safetensors", Checkpoints::kOptimizerFile}) {
    const fs::path file = folder / name;
    const std::string whole = read_file(file);
    std::string damaged = whole;
    damaged[damaged.size() / 2] ^= 1;
    write_file_atomically(file, damaged);
    EXPECT_THAT(newest_error(),
                HasSubstr(fmt::format("{}: expected {}, got {}", file.string(),
                                      checksum(folder_.write("whole", whole)).dump(), checksum(file).dump())));
    write_file_atomically(file, whole);
    EXPECT_EQ(newest_step(), 5) << name;
  }
}

TEST_F(CheckpointsTest, NoticesFilesOfAnotherStep) {
  save(5);
  const fs::path newer = Checkpoints(folder_.path(), 2).save(6, {{"step", 6}}, [](const fs::path& folder) {
    write_files(folder, /*seed=*/2);
  });
  fs::copy_file(newer / "model.safetensors", folder_.path() / "step-000005" / "model.safetensors",
                fs::copy_options::overwrite_existing);
  fs::remove_all(newer);
  EXPECT_THAT(newest_error(), HasSubstr("step-000005/model.safetensors: expected "));
}

TEST_F(CheckpointsTest, RequiresChecksumsAndLeavesLaterFilesAlone) {
  const fs::path folder = save(5);
  write_file_atomically(folder / "slices.safetensors", "put there by the user");
  EXPECT_EQ(newest_step(), 5);
  for (const char* files : {"null", "7", "{}"}) {
    write_file_atomically(folder / "state.json", fmt::format(R"({{"step": 5, "files": {}}})", files));
    EXPECT_THAT(newest_error(), HasSubstr("state.json: expected the checksums of the other files under 'files'"));
  }
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
    write_first(folder);
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
    Checkpoints(folder_.path() / "file").save(1, {{"step", 1}}, write_first);
    FAIL() << "expected DataError";
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/file: cannot be created: Not a directory"));
  }
}

}  // namespace
}  // namespace parlat
