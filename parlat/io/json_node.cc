#include "parlat/io/json_node.h"

#include <fmt/format.h>

#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/io/quote.h"

namespace parlat {

JsonNode JsonNode::operator[](const std::string& key) const {
  static const nlohmann::json kNull;
  if (!value_->is_object()) refuse("an object");
  const auto found = value_->find(key);
  return {found == value_->end() ? kNull : *found,
          fmt::format("{}{}{}", where_, where_.ends_with(':') ? " " : ".", printable(key))};
}

std::vector<JsonNode> JsonNode::elements() const {
  if (!value_->is_array()) refuse("an array");
  std::vector<JsonNode> nodes;
  for (size_t i = 0; i < value_->size(); ++i) nodes.emplace_back((*value_)[i], fmt::format("{}[{}]", where_, i));
  return nodes;
}

const std::string& JsonNode::text() const {
  if (!value_->is_string()) refuse("a string");
  return value_->get_ref<const std::string&>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}

int64_t JsonNode::integer(int64_t low, int64_t high) const {
  const bool fits =
      value_->is_number_integer() && (!value_->is_number_unsigned() || value_->get<uint64_t>() <= INT64_MAX);
  if (!fits || value_->get<int64_t>() < low || value_->get<int64_t>() > high) {
    refuse(fmt::format("an integer from {} to {}", low, high));
  }
  return value_->get<int64_t>();
}

void JsonNode::refuse(const std::string& expected) const {
  // Arrays and objects by name only: printing one takes stack in proportion to its depth.
  const std::string got = value_->is_string()       ? quote(value_->get_ref<const std::string&>())
                          : value_->is_structured() ? std::string("an ") + value_->type_name()
                                                    : value_->dump();
  const std::string place = where_.ends_with(':') ? where_.substr(0, where_.size() - 1) : where_;
  throw DataError("{}: expected {}, got {}", place, expected, got);
}

}  // namespace parlat
