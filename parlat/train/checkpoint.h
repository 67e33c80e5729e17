#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

namespace parlat {

struct Checkpoint {
  std::filesystem::path directory;
  int64_t step = 0;
  nlohmann::json state;  // of state.json
};

// The checkpoints of one run: DIRECTORY/step-000200/{config.json, model.safetensors, optimizer.safetensors,
// state.json, ...}. One appears under its name complete and synced, or not at all; whatever interrupts the writing
// leaves the previous ones as they were. state.json has the checksum of every other file under "files", so that none is
// taken for what was written that is damaged or another step's. To be used by one rank, but for at().
class Checkpoints {
 public:
  explicit Checkpoints(std::filesystem::path directory, int64_t keep = 1)
      : directory_(std::move(directory)), keep_(keep) {}

  bool any() const { return !steps().empty(); }
  // The newest whose files are what was written, each of which is read once for that; a warning for each newer one
  // that is damaged. Nothing where there is none, DataError where all are damaged.
  std::optional<Checkpoint> newest() const;
  // The one of this step, of which only state.json is read. DataError.
  Checkpoint at(int64_t step) const;

  // Calls write(folder) for the files beside state.json, adds their checksums to the state, makes the folder a
  // checkpoint, then removes all but the newest `keep` up to this step, and what is left of later steps. Throws
  // DataError where the disk is full or can't be written.
  std::filesystem::path save(int64_t step, nlohmann::json state,
                             const std::function<void(const std::filesystem::path&)>& write) const;

  static constexpr const char* kOptimizerFile = "optimizer.safetensors";

 private:
  std::vector<int64_t> steps() const;  // newest first
  std::filesystem::path path_of(int64_t step) const;
  void remove(const std::filesystem::path& checkpoint) const;
  void remove_leftovers() const;

  std::filesystem::path directory_;
  int64_t keep_;
};

}  // namespace parlat
