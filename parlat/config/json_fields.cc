#include "parlat/config/json_fields.h"

#include <cmath>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr size_t kLongestValue = 80;

// In ASCII and on one line, whatever the file holds.
std::string value_text(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongestValue) text = text.substr(0, kLongestValue) + "...";
  return text;
}

}  // namespace

const nlohmann::json* JsonFields::read(const std::string& key) {
  read_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

const nlohmann::json* JsonFields::find(const std::string& key) {
  const nlohmann::json* value = read(key);
  return value != nullptr && value->is_null() ? nullptr : value;
}

bool JsonFields::is_null(const std::string& key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

int64_t JsonFields::integer(const std::string& key, int64_t absent, int64_t low, int64_t high) {
  const nlohmann::json* value = read(key);
  if (value == nullptr) return absent;
  const bool fits = value->is_number_integer() && (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    refuse(key, fmt::format("an integer from {} to {}", low, high));
  }
  return value->get<int64_t>();
}

double JsonFields::number(const std::string& key, double absent, double low, double high) {
  if (read(key) == nullptr) return absent;
  const std::optional<double> value = optional_number(key, low, high);
  if (!value) refuse(key, fmt::format("a number from {} to {}", low, high));
  return *value;
}

std::optional<double> JsonFields::optional_number(const std::string& key, double low, double high) {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  const double number = value->is_number() ? value->get<double>() : NAN;
  if (!(low <= number && number <= high)) refuse(key, fmt::format("a number from {} to {}", low, high));
  return number;
}

bool JsonFields::boolean(const std::string& key, bool absent) {
  const nlohmann::json* value = read(key);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::string JsonFields::text(const std::string& key, const std::string& absent) {
  const nlohmann::json* value = read(key);
  if (value == nullptr) return absent;
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

void JsonFields::refuse(const std::string& key, const std::string& expected) const {
  const auto found = object_.find(key);
  const std::string got = found == object_.end() ? "nothing" : value_text(*found);
  const std::string quoted = value_text(key);
  throw ConfigError("{}{}: expected {}, got {}", where_, quoted.substr(1, quoted.size() - 2), expected, got);
}

std::vector<std::string> JsonFields::unread() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object_.items()) {
    if (!read_.contains(key)) keys.push_back(key);
  }
  return keys;
}

}  // namespace parlat
