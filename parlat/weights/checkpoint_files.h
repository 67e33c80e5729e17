#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parlat/io/atomic_file.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

// Reads the table's tensors from a Hugging Face directory (model.safetensors, or shards with
// model.safetensors.index.json), converted to dtype. Missing, misshapen and unknown tensors are reported together in
// one DataError. Returns the names that were skipped because parlat needs them not (multi-token-prediction layers,
// rotary inv_freq, a duplicate lm_head of a tied model).
std::vector<std::string> load_weights(const std::filesystem::path& directory, const ModelConfig& config,
                                      const std::vector<WeightRow>& table, at::ScalarType dtype);

// The checks of load_weights alone, of headers only: nothing is read or allocated (but for the duplicate head of a tied
// model, which must equal the embedding). Returns the names that loading would skip.
std::vector<std::string> check_weights(const std::filesystem::path& directory, const ModelConfig& config);

// The dtype in which the files hold each tensor of the weight table, by its name. Checks as check_weights does.
std::map<std::string, at::ScalarType> stored_dtypes(const std::filesystem::path& directory, const ModelConfig& config);

// A Hugging Face folder written shard by shard, so that the weights need not be in memory together. Nothing gets its
// name before everything is written and synced, so a full disk (DataError) leaves an earlier save as it was; where
// weights were written, those of an earlier save that they do not replace are then removed.
class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path directory, int64_t n_shards);  // so many of add_shard
  void add_shard(const std::vector<std::pair<std::string, Tensor>>& tensors);
  // A further file that appears together with the others; the caller writes it.
  AtomicFile& stage(const std::string& name);
  // A file of another folder, as it is and under its name. Weights take no room twice where hard links are possible.
  void add_file(const std::filesystem::path& file);
  // Writes the index (of more than one shard) and config.json, and commits.
  void finish(const ModelConfig& config);
  // Gives everything its name.
  void commit();

 private:
  std::filesystem::path directory_;
  int64_t n_shards_, written_ = 0, bytes_ = 0, parameters_ = 0;
  at::ScalarType dtype_ = at::kFloat;  // of the first tensor
  std::map<std::string, std::string> weight_map_;
  std::deque<AtomicFile> files_;
  std::set<std::string> names_;
};

// Writes config.json and the weights in shards of at most max_shard_bytes (with an index when more than one).
void save_weights(const std::filesystem::path& directory, const ModelConfig& config,
                  const std::vector<WeightRow>& table, int64_t max_shard_bytes = 5'000'000'000);

}  // namespace parlat
