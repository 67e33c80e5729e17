#pragma once

#include <filesystem>
#include <string>
#include <vector>

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

// Writes config.json and the weights in shards of at most max_shard_bytes (with an index when more than one). All files
// are written and synced before any gets its name, so that a full disk (DataError) leaves an earlier save as it was;
// weight files of an earlier save that the new one does not replace are removed.
void save_weights(const std::filesystem::path& directory, const ModelConfig& config,
                  const std::vector<WeightRow>& table, int64_t max_shard_bytes = 5'000'000'000);

}  // namespace parlat
