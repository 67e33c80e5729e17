#include <algorithm>
#include <optional>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/io/bpe_tokenizer.h"
#include "parlat/io/files.h"
#include "parlat/io/json_node.h"
#include "parlat/io/quote.h"
#include "parlat/io/tokenizer.h"
#include "parlat/io/tokenizer_json.h"

namespace parlat {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kTokenizerFile = "tokenizer.json";
constexpr const char* kTokenizerConfigFile = "tokenizer_config.json";
constexpr const char* kConfigFile = "config.json";

// Vocabularies of other programs, from which transformers makes a tokenizer.json.
std::string other_formats(const fs::path& directory) {
  for (const char* name : {"tiktoken.model", "tokenizer.model", "vocab.json"}) {
    std::error_code missing;
    if (fs::exists(directory / name, missing)) {
      return fmt::format(" ({} is there: let transformers write a {} from it)", name, kTokenizerFile);
    }
  }
  return "";
}

// The token that eos_token names: text, or an object with "content".
std::optional<int64_t> named_end(const JsonNode& config, const TokenizerSpec& spec) {
  const JsonNode eos = config["eos_token"];
  if (eos.is_null()) return std::nullopt;
  const std::string& text = eos.value().is_object() ? eos["content"].text() : eos.text();
  const auto found =
      std::find_if(spec.tokens.begin(), spec.tokens.end(), [&](const auto& token) { return token.text == text; });
  if (found == spec.tokens.end()) {
    throw DataError("{}: expected a token of {}, got {}", eos.where(), kTokenizerFile, quote(text));
  }
  return found->id;
}

// eos_token_id: a number, or several, of which the first ends a document.
std::optional<int64_t> numbered_end(const JsonNode& config) {
  const JsonNode eos = config["eos_token_id"];
  if (eos.is_null()) return std::nullopt;
  if (!eos.value().is_array()) return eos.integer(0, TokenizerSpec::kMostTokens - 1);
  const std::vector<JsonNode> several = eos.elements();
  if (several.empty()) eos.refuse("a token");
  return several.front().integer(0, TokenizerSpec::kMostTokens - 1);
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const fs::path& model_directory) {
  const fs::path path = model_directory / kTokenizerFile, config = model_directory / kTokenizerConfigFile,
                 model_config = model_directory / kConfigFile;
  std::error_code missing;
  if (!fs::exists(path, missing)) {
    throw DataError("{}: expected the tokenizer of the model, got no such file{}", path.string(),
                    other_formats(model_directory));
  }
  BpeTokenizerFiles files{.name = path.string(), .files = {{kTokenizerFile, read_file(path)}}, .end_of_document = {}};
  TokenizerSpec spec = parse_tokenizer_json(parse_json(files.files.at(kTokenizerFile), files.name), files.name);
  if (fs::exists(config, missing)) {
    files.files[kTokenizerConfigFile] = read_file(config);
    files.end_of_document =
        named_end({parse_json(files.files.at(kTokenizerConfigFile), config.string()), config.string() + ":"}, spec);
  }
  if (!files.end_of_document && fs::exists(model_config, missing)) {
    files.end_of_document = numbered_end({read_json(model_config), model_config.string() + ":"});
  }
  return make_bpe_tokenizer(std::move(spec), std::move(files));
}

}  // namespace parlat
