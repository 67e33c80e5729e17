#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parlat/config/model_config.h"

namespace parlat {

struct PredictedCache {
  std::vector<std::vector<std::string>> table;  // with its header
  nlohmann::json rows = nlohmann::json::array();
};

// What the cache of a token takes on a rank in bf16, for every decode layout on 1, 2, 4 and 8 ranks: computed from
// where the layout places it, not measured.
PredictedCache predict_cache(const ModelConfig& config);

}  // namespace parlat
