#include <fstream>

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

constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

std::string shard_name(int64_t index, int64_t count) {
  return count == 1 ? kOneFile : fmt::format("model-{:05d}-of-{:05d}.safetensors", index + 1, count);
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
    if ((weights || name == kIndex) && !current.contains(name)) {
      std::error_code ignored;
      std::filesystem::remove(file.path(), ignored);
    }
  }
}

void copy_bytes(const std::filesystem::path& from, AtomicFile& to) {
  std::ifstream in(from, std::ios::binary);
  std::string bytes(size_t{1} << 20, '\0');
  while (in.read(bytes.data(), static_cast<std::streamsize>(bytes.size())) || in.gcount() > 0) {
    to.write({bytes.data(), static_cast<size_t>(in.gcount())});
  }
  if (!in.eof()) throw DataError("{}: cannot be read", from.string());
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::filesystem::path directory, int64_t n_shards)
    : directory_(std::move(directory)), n_shards_(n_shards) {
  create_folders(directory_);
}

AtomicFile& CheckpointWriter::stage(const std::string& name) {
  names_.insert(name);
  return files_.emplace_back(directory_ / name);
}

void CheckpointWriter::add_shard(const std::vector<std::pair<std::string, Tensor>>& tensors) {
  PARLAT_ASSERT(written_ < n_shards_, "{} shards", n_shards_);
  const std::string name = shard_name(written_++, n_shards_);
  for (const auto& [tensor_name, tensor] : tensors) {
    if (weight_map_.empty()) dtype_ = tensor.scalar_type();
    weight_map_[tensor_name] = name;
    bytes_ += static_cast<int64_t>(tensor.nbytes());
    parameters_ += tensor.numel();
  }
  stage_safetensors(stage(name), tensors, {{"format", "pt"}});
}

void CheckpointWriter::add_file(const std::filesystem::path& file) {
  AtomicFile& staged = stage(file.filename());
  const bool linked = file.extension() == ".safetensors" && staged.link(file);  // others may be edited in place
  if (!linked) copy_bytes(file, staged);
}

void CheckpointWriter::finish(const ModelConfig& config) {
  PARLAT_ASSERT(written_ == n_shards_, "{} of {} shards", written_, n_shards_);
  if (n_shards_ > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", bytes_}, {"total_parameters", parameters_}}},
                                  {"weight_map", weight_map_}};
    stage(kIndex).write(index.dump(2) + "\n");
  }
  nlohmann::json hf = to_hf_json(config);
  hf.erase("dtype");
  hf["torch_dtype"] = torch_name(dtype_);
  stage("config.json").write(hf.dump(2) + "\n");
  commit();
}

void CheckpointWriter::commit() {
  for (AtomicFile& file : files_) file.sync();
  for (AtomicFile& file : files_) file.commit();
  if (names_.contains(kOneFile) || names_.contains(kIndex)) remove_stale(directory_, names_);
}

void save_weights(const std::filesystem::path& directory, const ModelConfig& config,
                  const std::vector<WeightRow>& table, int64_t max_shard_bytes) {
  const std::vector<NamedTensors> shards = split_in_shards(table, max_shard_bytes);
  CheckpointWriter writer(directory, static_cast<int64_t>(shards.size()));
  for (const NamedTensors& shard : shards) writer.add_shard(shard);
  writer.finish(config);
}

}  // namespace parlat
