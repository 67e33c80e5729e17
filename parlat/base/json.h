#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace parlat {

// Parsed JSON of a file that nobody vouches for. DataError, which begins with `name`: the position where it is not
// JSON, or nesting deeper than 64, since copying and printing a value recurse.
nlohmann::json parse_json(std::string_view text, const std::string& name);

}  // namespace parlat
