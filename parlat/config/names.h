#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "parlat/base/error.h"

namespace parlat {

// Enumerators and the words users write for them, as a table of (enumerator, word).
template <typename Table>
auto all_in(const Table& table) {
  std::vector<std::remove_const_t<decltype(table[0].first)>> all;
  for (const auto& [entry, text] : table) all.push_back(entry);
  return all;
}

template <typename Table>
std::string_view name_in(const Table& table, decltype(table[0].first) value) {
  for (const auto& [entry, text] : table) {
    if (entry == value) return text;
  }
  throw InternalError("an enumerator without a name");
}

template <typename Table>
auto parse_in(const Table& table, std::string_view what, std::string_view text) {
  std::string possible;
  for (const auto& [entry, entry_text] : table) {
    if (entry_text == text) return entry;
    possible += (possible.empty() ? "" : ", ") + std::string(entry_text);
  }
  throw ConfigError("{}: expected one of {}, got '{}'", what, possible, text);
}

}  // namespace parlat
