#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

inline std::filesystem::path fixtures_folder() { return std::filesystem::path(PARLAT_TESTS_DIR) / "fixtures"; }

// The folders that tests/fixtures/generate.py wrote.
inline std::vector<std::string> all_fixtures() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(fixtures_folder())) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// A model of transformers and what transformers computes with it: tokens, targets, logits, loss, gradient.NAME.
struct Fixture {
  ModelConfig config;
  std::filesystem::path folder;
  SafetensorsFile expected;
  explicit Fixture(const std::string& name)
      : config(load_model_config((fixtures_folder() / name).string())),
        folder(fixtures_folder() / name),
        expected(folder / "expected.safetensors") {}
  Tensor tokens() const { return expected.tensor("tokens"); }
  Tensor targets() const { return expected.tensor("targets"); }
};

// A rank's weights of a fixture, ready to be trained.
struct LoadedWeights {
  ModelWeights weights;
  std::vector<WeightRow> table;
  LoadedWeights(const Fixture& fixture, Range local_experts, at::ScalarType dtype) {
    table = weight_table(fixture.config, local_experts, weights);
    load_weights(fixture.folder, fixture.config, table, dtype);
    for (const WeightRow& row : table) row.tensor->requires_grad_(row.trained);
  }
};

}  // namespace parlat
