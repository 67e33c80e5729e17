#include "parlat/io/tokenizer_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/io/json_node.h"
#include "parlat/io/pre_tokenizer_json.h"
#include "parlat/io/quote.h"

namespace parlat {

using nlohmann::json;

namespace {

constexpr int kDeepest = 8;

// Where each text of the vocabulary is in TokenizerSpec::tokens; the texts are those of the JSON document.
using TokenIndex = std::unordered_map<std::string_view, size_t>;

TokenIndex parse_vocabulary(const JsonNode& node, TokenizerSpec& spec) {
  if (!node.value().is_object()) node.refuse("an object");
  TokenIndex index;
  for (auto entry = node.value().begin(); entry != node.value().end(); ++entry) {
    const std::string& text = entry.key();
    const json& id = *entry;
    if (!id.is_number_integer() || id < 0 || id >= TokenizerSpec::kMostTokens) {
      JsonNode(id, fmt::format("{}: {}", node.where(), quote(text)))
          .refuse(fmt::format("an integer from 0 to {}", TokenizerSpec::kMostTokens - 1));
    }
    index[text] = spec.tokens.size();
    spec.tokens.push_back({.id = id.get<int64_t>(), .text = text});
  }
  return index;
}

struct MergeSides {
  std::string_view left, right;
};

// Of "left right" or ["left", "right"]; nothing for all else.
std::optional<MergeSides> merge_sides(const json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return MergeSides{merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return MergeSides{text.substr(0, space), text.substr(space + 1)};
    }
  }
  return std::nullopt;
}

void parse_merges(const JsonNode& node, const TokenIndex& index, TokenizerSpec& spec) {
  if (!node.value().is_array()) node.refuse("an array");
  for (size_t rank = 0; rank < node.value().size(); ++rank) {
    const json& merge = node.value()[rank];
    if (merge.is_string() && merge.get_ref<const std::string&>().starts_with("#version")) continue;
    const auto where = [&] { return fmt::format("{}[{}]", node.where(), rank); };
    const auto sides = merge_sides(merge);
    if (!sides) JsonNode(merge, where()).refuse("\"left right\" or [\"left\", \"right\"]");
    const auto& [left, right] = *sides;
    const auto token = [&](std::string_view text) {
      const auto found = index.find(text);
      if (found == index.end()) {
        throw DataError("{}: expected tokens of the vocabulary, got {}", where(), quote(text));
      }
      return static_cast<int32_t>(spec.tokens[found->second].id);
    };
    spec.merges.push_back({token(left), token(right), token(std::string(left).append(right))});
  }
}

// Settings that would change the tokens, where they are not at rest.
void refuse_other_encodings(const JsonNode& model) {
  const JsonNode type = model["type"], dropout = model["dropout"];
  if (!type.is_null() && type.text() != "BPE") type.refuse("BPE");
  if (!dropout.is_null() && dropout.value() != 0) dropout.refuse("no dropout");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const JsonNode affix = model[key]; !affix.is_null() && !affix.text().empty()) affix.refuse("none");
  }
}

void parse_added_tokens(const JsonNode& node, TokenIndex& index, TokenizerSpec& spec) {
  if (node.is_null()) return;
  std::set<std::string_view> seen;
  for (const JsonNode& entry : node.elements()) {
    AddedToken token{.id = entry["id"].integer(0, TokenizerSpec::kMostTokens - 1),
                     .content = entry["content"].text(),
                     .single_word = entry["single_word"].boolean(false),
                     .lstrip = entry["lstrip"].boolean(false),
                     .rstrip = entry["rstrip"].boolean(false),
                     .normalized = entry["normalized"].boolean(true),
                     .special = entry["special"].boolean(false)};
    if (!seen.insert(entry["content"].text()).second) {
      throw DataError("{}: {} appears twice", entry.where(), quote(token.content));
    }
    const auto known = index.find(token.content);
    if (known == index.end()) {
      spec.tokens.push_back({.id = token.id, .text = token.content, .in_vocabulary = false, .added = true});
    } else if (const int64_t id = spec.tokens[known->second].id; id != token.id) {
      throw DataError("{}: expected {} to be {} as in the vocabulary, got {}", entry.where(), quote(token.content), id,
                      token.id);
    } else {
      spec.tokens[known->second].added = true;
    }
    spec.added_tokens.push_back(std::move(token));
  }
}

void require_distinct_ids(std::vector<TokenizerSpec::Token>& tokens, const std::string& name) {
  if (tokens.empty()) throw DataError("{}: expected a vocabulary, got no token", name);
  std::sort(tokens.begin(), tokens.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  const auto twice =
      std::adjacent_find(tokens.begin(), tokens.end(), [](const auto& a, const auto& b) { return a.id == b.id; });
  if (twice != tokens.end()) {
    throw DataError("{}: expected one token with id {}, got {} and {}", name, twice->id, quote(twice->text),
                    quote((twice + 1)->text));
  }
}

// True for NFC; DataError for any other that changes text.
bool parse_normalizer(const JsonNode& node, int depth = 0) {
  if (node.is_null()) return false;
  const JsonNode type = node["type"];
  if (type.text() == "NFC") return true;
  if (type.text() != "Sequence" || depth > kDeepest) type.refuse("NFC or none");
  bool nfc = false;
  for (const JsonNode& part : node["normalizers"].elements()) nfc = parse_normalizer(part, depth + 1) || nfc;
  return nfc;
}

std::vector<int64_t> template_prefix(const JsonNode& node) {
  std::vector<int64_t> prefix;
  for (const JsonNode& piece : node["single"].elements()) {
    const JsonNode special = piece["SpecialToken"];
    if (special.is_null()) break;  // the text itself
    for (const JsonNode& id : node["special_tokens"][special["id"].text()]["ids"].elements()) {
      prefix.push_back(id.integer(0, TokenizerSpec::kMostTokens - 1));
    }
  }
  return prefix;
}

// The tokens in front of a text, of all that a post-processor may do.
std::vector<int64_t> parse_post_processor(const JsonNode& node, int depth = 0) {
  if (node.is_null()) return {};
  const JsonNode type = node["type"];
  if (type.text() == "ByteLevel") return {};
  if (type.text() == "TemplateProcessing") return template_prefix(node);
  if (type.text() == "RobertaProcessing" || type.text() == "BertProcessing") {
    const std::vector<JsonNode> first = node["cls"].elements();
    if (first.size() != 2) node["cls"].refuse("[token, id]");
    return {first[1].integer(0, TokenizerSpec::kMostTokens - 1)};
  }
  if (type.text() != "Sequence" || depth > kDeepest) {
    type.refuse("ByteLevel, TemplateProcessing, RobertaProcessing, BertProcessing or Sequence");
  }
  std::vector<int64_t> prefix;
  for (const JsonNode& part : node["processors"].elements()) {
    const std::vector<int64_t> more = parse_post_processor(part, depth + 1);
    prefix.insert(prefix.begin(), more.begin(), more.end());
  }
  return prefix;
}

void check_decoder(const JsonNode& node) {
  if (!node.is_null() && node["type"].text() != "ByteLevel") node["type"].refuse("ByteLevel");
}

}  // namespace

TokenizerSpec parse_tokenizer_json(const json& file, const std::string& name) {
  const JsonNode root(file, name + ":");
  const JsonNode version = root["version"], model = root["model"];
  if (!version.is_null() && version.text() != "1.0") version.refuse("1.0");
  refuse_other_encodings(model);
  check_decoder(root["decoder"]);
  TokenizerSpec spec;
  spec.nfc = parse_normalizer(root["normalizer"]);
  spec.pre_tokenizer = parse_pre_tokenizer(root["pre_tokenizer"]);
  spec.prefix = parse_post_processor(root["post_processor"]);
  spec.ignore_merges = model["ignore_merges"].boolean(false);
  TokenIndex index = parse_vocabulary(model["vocab"], spec);
  parse_merges(model["merges"], index, spec);
  parse_added_tokens(root["added_tokens"], index, spec);
  require_distinct_ids(spec.tokens, name);
  return spec;
}

}  // namespace parlat
