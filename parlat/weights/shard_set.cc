#include "parlat/weights/shard_set.h"

#include "parlat/base/error.h"
#include "parlat/io/files.h"

namespace parlat {

namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::string_view kTextModelPrefix = "language_model.";

std::string plain_name(const std::string& name) {
  return name.starts_with(kTextModelPrefix) ? name.substr(kTextModelPrefix.size()) : name;
}

}  // namespace

ShardSet::ShardSet(const std::filesystem::path& directory, std::vector<std::string>& problems) {
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index_path = directory / kIndex;
  std::error_code ignored;
  if (std::filesystem::exists(single, ignored)) {
    // Without it there is nothing else to report: its own error goes on.
    add("model.safetensors", SafetensorsFile(single), problems);
    return;
  }
  if (!std::filesystem::exists(index_path, ignored)) {
    throw DataError("{}: expected model.safetensors or model.safetensors.index.json, got neither", directory.string());
  }
  indexed_ = true;
  const std::map<std::string, std::string> index = read_index(index_path, problems);
  std::set<std::string> shards;
  for (const auto& [name, shard] : index) shards.insert(shard);
  for (const std::string& shard : shards) open(directory, shard, problems);

  std::set<std::string> readable;
  for (const Shard& shard : files_) readable.insert(shard.name);
  std::set<std::string> indexed;
  for (const auto& [full_name, shard] : index) {
    const std::string name = plain_name(full_name);
    indexed.insert(name);
    if (!readable.contains(shard)) {
      lost_.insert(name);
    } else if (!contains(name) || file_of(name) != shard) {
      problems.push_back(fmt::format("{}: expected in {}, as the index says, got {}", name, shard,
                                     contains(name) ? "it in " + file_of(name) : "none there"));
      lost_.insert(name);
    }
  }
  for (const auto& [name, place] : where_) {
    if (!indexed.contains(name)) {
      problems.push_back(fmt::format("{}: in {} but not in the index", name, files_[place.file].name));
    }
  }
}

std::map<std::string, std::string> ShardSet::read_index(const std::filesystem::path& path,
                                                        std::vector<std::string>& problems) {
  const nlohmann::json index = read_json(path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) throw DataError("{}: expected an object weight_map", path.string());
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : map->items()) {
    const std::string file = shard.is_string() ? shard.get<std::string>() : "";
    // A shard is a file of this folder, never a path out of it; systems end a name at NUL.
    constexpr std::string_view kNever("/\0", 2);
    if (file.empty() || file == "." || file == ".." || file.find_first_of(kNever) != std::string::npos) {
      problems.push_back(fmt::format("{}: expected a file name in the index, got {}", name, shard.dump()));
      lost_.insert(plain_name(name));
      continue;
    }
    shards[name] = file;
  }
  return shards;
}

void ShardSet::open(const std::filesystem::path& directory, const std::string& file,
                    std::vector<std::string>& problems) {
  try {
    add(file, SafetensorsFile(directory / file), problems);
  } catch (const DataError& error) {
    // The directory precedes the list of problems already.
    std::string problem = error.what();
    if (const std::string prefix = (directory / "").string(); problem.starts_with(prefix))
      problem.erase(0, prefix.size());
    problems.push_back(problem);
  }
}

void ShardSet::add(const std::string& file, SafetensorsFile shard, std::vector<std::string>& problems) {
  files_.push_back({file, std::move(shard)});
  for (const auto& [name, entry] : files_.back().file.entries()) {
    multimodal_ = multimodal_ || name.starts_with(kTextModelPrefix);
    const auto [place, fresh] = where_.try_emplace(plain_name(name), Place{files_.size() - 1, name});
    if (!fresh) {
      problems.push_back(fmt::format("{}: in {} and again in {}", name, files_[place->second.file].name, file));
    }
  }
}

Tensor ShardSet::tensor(const std::string& name) const {
  const Place& place = where_.at(name);
  return files_.at(place.file).file.tensor(place.name_in_file);
}

std::vector<std::string> ShardSet::names() const {
  std::vector<std::string> all;
  for (const auto& [name, place] : where_) all.push_back(name);
  return all;
}

std::vector<std::string> ShardSet::files() const {
  std::vector<std::string> all;
  for (const Shard& shard : files_) all.push_back(shard.name);
  if (indexed_) all.emplace_back(kIndex);
  return all;
}

}  // namespace parlat
