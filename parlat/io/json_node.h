#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace parlat {

// A value of a JSON file and its place there, with which every error (DataError) begins:
// "tokenizer.json: model.merges: expected an array, got null". The value outlives it.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string where) : value_(&value), where_(std::move(where)) {}

  bool is_null() const { return value_->is_null(); }
  JsonNode operator[](const std::string& key) const;  // of an object; null where it has none of that name
  std::vector<JsonNode> elements() const;             // of an array
  const std::string& text() const;
  bool boolean() const;
  bool boolean(bool absent) const { return is_null() ? absent : boolean(); }
  int64_t integer(int64_t low, int64_t high) const;

  const nlohmann::json& value() const { return *value_; }
  const std::string& where() const { return where_; }
  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  const nlohmann::json* value_;
  std::string where_;
};

}  // namespace parlat
