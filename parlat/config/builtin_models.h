#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace parlat {

// The config.json of a public model (its repository on the Hugging Face hub) or of `tiny`; nothing for other names.
std::optional<nlohmann::json> builtin_model(const std::string& name);

}  // namespace parlat
