#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace parlat {

// Reads the keys of one JSON object with types and bounds, and remembers which were read. Every method throws
// ConfigError "config.json: hidden_size: expected an integer from 1 to 1048576, got "7168"".
class JsonFields {
 public:
  // `where` precedes the key in errors: "config.json: " or "config.json: rope_scaling.".
  JsonFields(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  // The value, or nullptr where the key is absent or null.
  const nlohmann::json* find(const std::string& key);
  bool is_null(const std::string& key) const;  // present and null

  // Null is refused, absent gives `absent`.
  int64_t integer(const std::string& key, int64_t absent, int64_t low, int64_t high);
  double number(const std::string& key, double absent, double low, double high);
  bool boolean(const std::string& key, bool absent);
  std::string text(const std::string& key, const std::string& absent);
  // Absent or null gives nothing; integers may stand for floats.
  std::optional<double> optional_number(const std::string& key, double low, double high);

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;
  std::vector<std::string> unread() const;
  const nlohmann::json& object() const { return object_; }

 private:
  const nlohmann::json* read(const std::string& key);
  const nlohmann::json& object_;
  std::string where_;
  std::set<std::string> read_;
};

}  // namespace parlat
