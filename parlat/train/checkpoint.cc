#include "parlat/train/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/checksum.h"
#include "parlat/io/files.h"

namespace parlat {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step-";
// Folders that are being written or removed. What a killed process leaves of them goes with the next checkpoint.
constexpr std::string_view kUnfinished = ".unfinished-";
constexpr const char* kStateFile = "state.json";

constexpr const char* kFiles = "files";

// Of every file in a folder.
nlohmann::json checksums(const fs::path& folder) {
  nlohmann::json all = nlohmann::json::object();
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    all[entry.path().filename().string()] = checksum(entry.path());
  }
  return all;
}

// Files that came later are not the checkpoint's: parlat convert may have put slices beside the weights.
void verify_files(const Checkpoint& checkpoint) {
  const auto files = checkpoint.state.find(kFiles);
  if (files == checkpoint.state.end() || !files->is_object() || !files->contains(Checkpoints::kOptimizerFile)) {
    throw DataError("{}: expected the checksums of the other files under '{}', got none",
                    (checkpoint.directory / kStateFile).string(), kFiles);
  }
  for (const auto& [name, expected] : files->items()) {
    const fs::path path = checkpoint.directory / name;
    if (const nlohmann::json found = checksum(path); found != expected) {
      throw DataError("{}: expected {}, got {}", path.string(), expected.dump(), found.dump());
    }
  }
}

}  // namespace

fs::path Checkpoints::path_of(int64_t step) const { return directory_ / fmt::format("{}{:06d}", kPrefix, step); }

std::vector<int64_t> Checkpoints::steps() const {
  std::vector<int64_t> steps;
  std::error_code error;
  fs::directory_iterator entries(directory_, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = 0;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (entries->path() == path_of(step)) steps.push_back(step);  // other names are not parlat's
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw DataError("{}: cannot be read: {}", directory_.string(), error.message());
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

Checkpoint Checkpoints::at(int64_t step) const {
  const fs::path directory = path_of(step), state_file = directory / kStateFile;
  Checkpoint checkpoint{directory, step, read_json(state_file)};
  const auto found = checkpoint.state.find("step");
  if (found == checkpoint.state.end() || *found != step) {
    throw DataError("{}: expected step {}, got {}", state_file.string(), step,
                    found == checkpoint.state.end() ? "none" : found->dump());
  }
  return checkpoint;
}

std::optional<Checkpoint> Checkpoints::newest() const {
  std::vector<std::string> damages;
  for (const int64_t step : steps()) {
    try {
      Checkpoint checkpoint = at(step);
      verify_files(checkpoint);
      for (const std::string& damage : damages) log_warning("damaged checkpoint passed over: " + damage);
      return checkpoint;
    } catch (const std::exception& error) {
      damages.emplace_back(error.what());
    }
  }
  if (damages.empty()) return std::nullopt;
  throw DataError("{}: none of the checkpoints can be read: {}", directory_.string(), fmt::join(damages, "; "));
}

fs::path Checkpoints::save(int64_t step, nlohmann::json state,
                           const std::function<void(const fs::path&)>& write) const {
  const fs::path place = path_of(step);
  const fs::path unfinished = directory_ / fmt::format("{}{}", kUnfinished, place.filename().string());
  try {
    create_folders(directory_);
    remove_leftovers();
    fs::create_directory(unfinished);
    write(unfinished);
    state[kFiles] = checksums(unfinished);
    write_file_atomically(unfinished / kStateFile, state.dump(2) + "\n");
    sync_folder(unfinished);
    if (fs::exists(place)) remove(place);  // a damaged one that was passed over
    fs::rename(unfinished, place);
    sync_folder(directory_);
    // Later ones are damaged, since the run went on from an earlier one: they don't count.
    int64_t kept = 0;
    for (const int64_t other : steps()) {
      if (other > step || ++kept > keep_) remove(path_of(other));
    }
  } catch (const fs::filesystem_error& error) {
    throw DataError("checkpoint {}: {}", place.string(), error.code().message());
  }
  return place;
}

// In two moves, so that a half-removed checkpoint never carries a checkpoint's name.
void Checkpoints::remove(const fs::path& checkpoint) const {
  const fs::path going = directory_ / fmt::format("{}removed-{}", kUnfinished, checkpoint.filename().string());
  fs::rename(checkpoint, going);
  fs::remove_all(going);
}

void Checkpoints::remove_leftovers() const {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_)) {
    if (entry.path().filename().string().starts_with(kUnfinished)) fs::remove_all(entry.path());
  }
}

}  // namespace parlat
