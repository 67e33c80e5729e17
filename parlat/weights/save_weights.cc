#include <set>

#include "parlat/base/error.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

std::vector<NamedTensors> split_in_shards(const std::vector<WeightRow>& table, int64_t max_shard_bytes) {
  std::vector<NamedTensors> shards(1);
  int64_t bytes = 0;
  for (const WeightRow& row : table) {
    PARLAT_ASSERT(row.tensor->defined(), "{} has no value", row.name);
    const auto row_bytes = static_cast<int64_t>(row.tensor->nbytes());
    if (bytes + row_bytes > max_shard_bytes && !shards.back().empty()) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().emplace_back(row.name, *row.tensor);
    bytes += row_bytes;
  }
  return shards;
}

std::string shard_name(size_t index, size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05d}-of-{:05d}.safetensors", index + 1, count);
}

nlohmann::json index_json(const std::vector<NamedTensors>& shards) {
  nlohmann::json map = nlohmann::json::object();
  int64_t bytes = 0, parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const auto& [name, tensor] : shards[i]) {
      map[name] = shard_name(i, shards.size());
      bytes += static_cast<int64_t>(tensor.nbytes());
      parameters += tensor.numel();
    }
  }
  return {{"metadata", {{"total_size", bytes}, {"total_parameters", parameters}}}, {"weight_map", map}};
}

const char* torch_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    default:
      return "float32";
  }
}

// Weight files of an earlier save that the new one did not replace: readers would prefer or mix them.
void remove_stale(const std::filesystem::path& directory, const std::set<std::string>& current) {
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    const std::string name = file.path().filename();
    const bool weights = name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".tmp"));
    if ((weights || name == "model.safetensors.index.json") && !current.contains(name)) {
      std::error_code ignored;
      std::filesystem::remove(file.path(), ignored);
    }
  }
}

}  // namespace

void save_weights(const std::filesystem::path& directory, const ModelConfig& config,
                  const std::vector<WeightRow>& table, int64_t max_shard_bytes) {
  create_folders(directory);
  const std::vector<NamedTensors> shards = split_in_shards(table, max_shard_bytes);

  // All are written and synced before the first gets its name; the index and the configuration come last.
  std::vector<AtomicFile> files;
  std::set<std::string> names;
  const auto stage = [&](const std::string& name) -> AtomicFile& {
    names.insert(name);
    return files.emplace_back(directory / name);
  };
  for (size_t i = 0; i < shards.size(); ++i) {
    stage_safetensors(stage(shard_name(i, shards.size())), shards[i], {{"format", "pt"}});
  }
  if (shards.size() > 1) stage("model.safetensors.index.json").write(index_json(shards).dump(2) + "\n");
  nlohmann::json hf = to_hf_json(config);
  hf.erase("dtype");
  hf["torch_dtype"] = torch_name(table.front().tensor->scalar_type());
  stage("config.json").write(hf.dump(2) + "\n");
  for (AtomicFile& file : files) file.sync();
  for (AtomicFile& file : files) file.commit();
  remove_stale(directory, names);
}

}  // namespace parlat
