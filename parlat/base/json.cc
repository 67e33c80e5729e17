#include "parlat/base/json.h"

#include "parlat/base/error.h"

namespace parlat {

nlohmann::json parse_json(std::string_view text, const std::string& name) {
  constexpr int kDeepest = 64;
  using nlohmann::json;
  const auto check_depth = [&](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest) throw DataError("{}: expected JSON nested at most {} deep, got more", name, kDeepest);
    return true;
  };
  try {
    return json::parse(text, check_depth);
  } catch (const json::exception& error) {
    throw DataError("{}: not JSON: {}", name, error.what());
  }
}

}  // namespace parlat
