#include "parlat/train/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"

namespace parlat {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step-";
// Folders that are being written or removed. What a killed process leaves of them goes with the next checkpoint.
constexpr std::string_view kUnfinished = ".unfinished-";
constexpr const char* kStateFile = "state.json";

void sync_folder(const fs::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!synced) throw DataError("{}: cannot be synced: {}", folder.string(), std::strerror(error));
}

// Opens every file: a file cut short, or a header that does not fit its size, shows.
Checkpoint read_checkpoint(const fs::path& directory, int64_t step) {
  Checkpoint checkpoint{directory, step, read_json(directory / kStateFile)};
  const auto found = checkpoint.state.find("step");
  if (found == checkpoint.state.end() || *found != step) {
    throw DataError("{}: expected step {}, got {}", (directory / kStateFile).string(), step,
                    found == checkpoint.state.end() ? "none" : found->dump());
  }
  read_json(directory / "config.json");
  for (const fs::directory_entry& file : fs::directory_iterator(directory)) {
    if (file.path().extension() == ".safetensors") SafetensorsFile check(file.path());
  }
  SafetensorsFile optimizer(directory / Checkpoints::kOptimizerFile);
  return checkpoint;
}

}  // namespace

fs::path Checkpoints::path_of(int64_t step) const { return directory_ / fmt::format("{}{:06d}", kPrefix, step); }

std::vector<int64_t> Checkpoints::steps() const {
  std::vector<int64_t> steps;
  if (!fs::is_directory(directory_)) return steps;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_directory() || !name.starts_with(kPrefix)) continue;
    int64_t step = 0;
    const char* const end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
    if (error == std::errc() && stop == end) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

Checkpoint Checkpoints::at(int64_t step) const { return read_checkpoint(path_of(step), step); }

std::optional<Checkpoint> Checkpoints::newest() const {
  for (const int64_t step : steps()) {
    try {
      return at(step);
    } catch (const std::exception& error) {
      log_warning(fmt::format("checkpoint {} is damaged and passed over: {}", path_of(step).string(), error.what()));
    }
  }
  return std::nullopt;
}

fs::path Checkpoints::save(int64_t step, const nlohmann::json& state,
                           const std::function<void(const fs::path&)>& write) const {
  const fs::path place = path_of(step);
  const fs::path unfinished = directory_ / fmt::format("{}{}", kUnfinished, place.filename().string());
  try {
    fs::create_directories(directory_);
    remove_leftovers();
    fs::create_directory(unfinished);
    write(unfinished);
    write_file_atomically(unfinished / kStateFile, state.dump(2) + "\n");
    sync_folder(unfinished);
    if (fs::exists(place)) remove(place);  // a damaged one that was passed over
    fs::rename(unfinished, place);
    sync_folder(directory_);
    const std::vector<int64_t> all = steps();
    for (size_t i = keep_; i < all.size(); ++i) remove(path_of(all[i]));
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
