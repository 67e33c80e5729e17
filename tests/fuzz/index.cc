// The index of a checkpoint of several shards: it is sound, or all that is wrong with it makes a DataError of one line.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "parlat/base/error.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/temporary_folder.h"
#include "tests/weights/small_model.h"

namespace {

// Two shards, which every index is read beside.
struct Checkpoint {
  parlat::TemporaryFolder folder;
  parlat::ModelConfig config = parlat::small_model();

  Checkpoint() {
    config.n_layers = 1;
    parlat::ModelWeights weights;
    const std::vector<parlat::WeightRow> table = weight_table(config, all_experts(config), weights);
    initialize(table, config, /*seed=*/1, at::kFloat);
    save_weights(folder.path(), config, table, /*max_shard_bytes=*/28'000);
  }
};

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Checkpoint checkpoint;
  checkpoint.folder.write("model.safetensors.index.json", {reinterpret_cast<const char*>(data), size});
  try {
    check_weights(checkpoint.folder.path(), checkpoint.config);
  } catch (const parlat::DataError& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
  }
  return 0;
}
