#include "parlat/io/pre_tokenizer_json.h"

#include <array>
#include <string_view>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/io/quote.h"

namespace parlat {

namespace {

constexpr int kDeepest = 8;
constexpr size_t kMostSplits = 64;  // each takes stack in PreTokenizer::cut

// GPT-2's encoder.py.
constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitBehavior parse_behavior(const JsonNode& node) {
  static constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kBehaviors = {
      {{"Isolated", SplitBehavior::kIsolated},
       {"Removed", SplitBehavior::kRemoved},
       {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
       {"MergedWithNext", SplitBehavior::kMergedWithNext},
       {"Contiguous", SplitBehavior::kContiguous}}};
  for (const auto& [name, behavior] : kBehaviors) {
    if (node.text() == name) return behavior;
  }
  node.refuse("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
}

Split parse_split(const JsonNode& node) {
  const JsonNode pattern = node["pattern"], text = pattern["String"];
  return {.pattern = text.is_null() ? Regex(pattern["Regex"].text(), pattern.where())
                                    : Regex::literal(text.text(), pattern.where()),
          .behavior = parse_behavior(node["behavior"]),
          .invert = node["invert"].boolean(false)};
}

Split parse_digits(const JsonNode& node) {
  const bool individual = node["individual_digits"].boolean();
  return {.pattern = Regex(R"(\p{N})", node.where()),
          .behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous};
}

Split parse_punctuation(const JsonNode& node) {
  const JsonNode behavior = node["behavior"];
  // With ASCII's symbols, which Unicode counts elsewhere.
  return {.pattern = Regex(R"([\p{P}!-/:-@\[-`{-~])", node.where()),
          .behavior = behavior.is_null() ? SplitBehavior::kIsolated : parse_behavior(behavior)};
}

void parse(const JsonNode& node, int depth, bool& byte_level, PreTokenizer& rules) {
  const std::string& type = node["type"].text();
  if (depth > kDeepest || rules.splits.size() >= kMostSplits) {
    throw DataError("{}: expected at most {} splits in sequences {} deep, got more", node.where(), kMostSplits,
                    kDeepest);
  }
  if (type == "Sequence") {
    for (const JsonNode& part : node["pretokenizers"].elements()) parse(part, depth + 1, byte_level, rules);
    return;
  }
  // What follows would see the bytes in the alphabet of tokenizer.json.
  if (byte_level) throw DataError("{}: {} behind ByteLevel is not supported", node.where(), quote(type));
  if (type == "Split") {
    rules.splits.push_back(parse_split(node));
  } else if (type == "Digits") {
    rules.splits.push_back(parse_digits(node));
  } else if (type == "Punctuation") {
    rules.splits.push_back(parse_punctuation(node));
  } else if (type == "ByteLevel") {
    byte_level = true;
    rules.add_prefix_space = node["add_prefix_space"].boolean();
    if (node["use_regex"].boolean(true)) rules.space_splits.push_back({.pattern = Regex(kGpt2, node.where())});
  } else {
    node["type"].refuse("Split, Digits, Punctuation, ByteLevel or Sequence");
  }
}

}  // namespace

PreTokenizer parse_pre_tokenizer(const JsonNode& node) {
  if (node.is_null()) node.refuse("a pre-tokenizer, since only byte-level encodings are supported");
  PreTokenizer rules;
  bool byte_level = false;
  parse(node, 0, byte_level, rules);
  if (!byte_level) throw DataError("{}: expected one that ends in ByteLevel, got none", node.where());
  return rules;
}

}  // namespace parlat
