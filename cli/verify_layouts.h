#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/common.h"

namespace parlat {

struct VerifiedLayouts {
  std::vector<std::vector<std::string>> table;  // with its header
  nlohmann::json rows = nlohmann::json::array();
  bool ok = true;
};

// Every decode layout on every rank count, sliced ones with every number of groups that divides the ranks, on the first
// two layers of a checkpoint, against its definition in fp64. The table also says what one rank cannot have.
VerifiedLayouts verify_layouts(const CommonOptions& common, const std::filesystem::path& model, double inner_norm_eps);

}  // namespace parlat
