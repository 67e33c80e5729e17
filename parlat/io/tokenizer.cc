#include "parlat/io/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/io/byte_alphabet.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

using nlohmann::json;

constexpr int64_t kBytes = 256;
constexpr const char* kEndOfDocumentName = "<|end_of_document|>";

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab_size() const override { return kEndOfDocument + 1; }
  std::vector<int64_t> encode(std::string_view text) const override {
    std::vector<int64_t> tokens;
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const int64_t token : tokens) {
      if (token < 0 || token > kEndOfDocument) {
        throw ConfigError("token: expected 0 to {}, got {}", kEndOfDocument, token);
      }
      if (token != kEndOfDocument) text += static_cast<char>(token);
    }
    return text;
  }
  int64_t end_of_document() const override { return kEndOfDocument; }
  std::vector<int64_t> prefix() const override { return {}; }
  std::string name() const override { return "bytes"; }
  std::map<std::string, std::string> files() const override;

 private:
  static constexpr int64_t kEndOfDocument = kBytes;
};

// Byte pair encoding that merges nothing, over text that is not split.
std::map<std::string, std::string> ByteTokenizer::files() const {
  json vocab = json::object();
  for (int64_t byte = 0; byte < kBytes; ++byte) vocab[byte_character(static_cast<unsigned char>(byte))] = byte;
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const json end = {{"id", kEndOfDocument}, {"content", kEndOfDocumentName}, {"single_word", false}, {"lstrip", false},
                    {"rstrip", false},      {"normalized", false},           {"special", true}};
  const json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", json::array({end})},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", byte_level},
                          {"post_processor", nullptr},
                          {"decoder", byte_level},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"continuing_subword_prefix", nullptr},
                            {"end_of_word_suffix", nullptr},
                            {"fuse_unk", false},
                            {"byte_fallback", false},
                            {"ignore_merges", false},
                            {"vocab", std::move(vocab)},
                            {"merges", json::array()}}}};
  const json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", kEndOfDocumentName}};
  return {{"tokenizer.json", tokenizer.dump(2) + "\n"}, {"tokenizer_config.json", config.dump(2) + "\n"}};
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::string TextStream::push(int64_t token) {
  std::string text = std::exchange(held_, "") + tokenizer_->decode({token});
  for (size_t length = 1; length <= std::min<size_t>(3, text.size()); ++length) {
    if (utf8_partial_length(text, text.size() - length) != length) continue;
    held_ = text.substr(text.size() - length);
    text.resize(text.size() - length);
    break;
  }
  return replace_invalid_utf8(text);
}

std::string TextStream::finish() { return replace_invalid_utf8(std::exchange(held_, "")); }

}  // namespace parlat
