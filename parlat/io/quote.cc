#include "parlat/io/quote.h"

#include <nlohmann/json.hpp>

namespace parlat {

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 80;
  const bool cut = text.size() > kLongest;
  const nlohmann::json value = std::string(text.substr(0, kLongest)) + (cut ? "..." : "");
  return value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace parlat
