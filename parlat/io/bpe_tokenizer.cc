#include "parlat/io/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/io/byte_alphabet.h"
#include "parlat/io/nfc.h"

namespace parlat {

namespace {

// Where words of one encode call already lie among its tokens: a table without chains, in which a newer word takes an
// older one's place. Text is mostly words that it had before.
class WordCache {
 public:
  explicit WordCache(size_t text_bytes)
      : entries_(std::bit_ceil(std::clamp<size_t>(text_bytes / 8, 1, size_t{1} << 15))) {}

  // Appends what `encode` appends for this word; the word's bytes must stay.
  template <typename Encode>
  void encode(std::string_view word, std::vector<int64_t>& tokens, const Encode& encode) {
    if (word.size() > kLongest) return encode(word);
    Entry& entry = entries_[std::hash<std::string_view>()(word) & (entries_.size() - 1)];
    const size_t first = tokens.size();
    if (entry.word == word) {
      tokens.resize(first + entry.count);
      std::copy_n(tokens.begin() + static_cast<int64_t>(entry.first), entry.count,
                  tokens.begin() + static_cast<int64_t>(first));
      return;
    }
    encode(word);
    entry = {word, first, tokens.size() - first};
  }

 private:
  static constexpr size_t kLongest = 64;
  struct Entry {
    std::string_view word;
    size_t first = 0, count = 0;
  };
  std::vector<Entry> entries_;
};

// What each token is in text, by id.
class TokenTexts {
 public:
  explicit TokenTexts(const std::vector<TokenizerSpec::Token>& tokens) {
    for (const TokenizerSpec::Token& token : tokens) {  // by id
      while (count() < token.id) add(unnamed(count()));
      const auto bytes = token.added ? std::nullopt : bytes_of_characters(token.text);
      add(bytes ? *bytes : token.text);
    }
  }
  int64_t count() const { return static_cast<int64_t>(ends_.size()) - 1; }
  void append(int64_t id, std::string& text) const {
    if (id < count()) {
      text.append(bytes_, ends_[id], ends_[id + 1] - ends_[id]);
    } else {
      text += unnamed(id);
    }
  }

 private:
  static std::string unnamed(int64_t id) { return fmt::format("<|id {}|>", id); }
  void add(std::string_view text) {
    bytes_ += text;
    ends_.push_back(bytes_.size());
  }
  std::string bytes_;
  std::vector<size_t> ends_ = {0};
};

Bpe make_bpe(const TokenizerSpec& spec) {
  std::array<int32_t, 256> byte_tokens;
  byte_tokens.fill(Bpe::kNoToken);
  std::unordered_map<std::string, int32_t> words;
  for (const TokenizerSpec::Token& token : spec.tokens) {
    const auto bytes = bytes_of_characters(token.text);
    if (!bytes || bytes->empty() || !token.in_vocabulary) continue;
    const auto id = static_cast<int32_t>(token.id);
    if (bytes->size() == 1) byte_tokens[static_cast<unsigned char>(bytes->front())] = id;
    if (spec.ignore_merges) words[*bytes] = id;
  }
  return {byte_tokens, spec.merges, std::move(words)};
}

AddedTokens added_tokens(const TokenizerSpec& spec, bool normalized) {
  std::vector<AddedToken> tokens;
  for (AddedToken token : spec.added_tokens) {
    if (token.normalized != normalized) continue;
    if (normalized && spec.nfc) token.content = nfc(token.content);
    tokens.push_back(std::move(token));
  }
  return AddedTokens(std::move(tokens));
}

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerSpec spec, BpeTokenizerFiles files)
      : texts_(spec.tokens),
        bpe_(make_bpe(spec)),
        added_(added_tokens(spec, false)),
        added_normalized_(added_tokens(spec, true)),
        nfc_(spec.nfc),
        pre_tokenizer_(std::move(spec.pre_tokenizer)),
        prefix_(std::move(spec.prefix)),
        files_(std::move(files)) {}

  int64_t vocab_size() const override { return texts_.count(); }
  std::vector<int64_t> encode(std::string_view text) const override;
  std::string decode(const std::vector<int64_t>& tokens) const override;
  int64_t end_of_document() const override {
    if (!files_.end_of_document) {
      throw ConfigError(
          "{}: expected an end of document (eos_token in tokenizer_config.json, or eos_token_id in "
          "config.json), got none",
          files_.name);
    }
    return *files_.end_of_document;
  }
  std::vector<int64_t> prefix() const override { return prefix_; }
  std::string name() const override { return files_.name; }
  std::map<std::string, std::string> files() const override { return files_.files; }

 private:
  TokenTexts texts_;
  Bpe bpe_;
  AddedTokens added_, added_normalized_;
  bool nfc_;
  PreTokenizer pre_tokenizer_;
  std::vector<int64_t> prefix_;
  BpeTokenizerFiles files_;
};

std::vector<int64_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<int64_t> tokens;
  WordCache cache(text.size());
  std::deque<std::string> normalised;  // kept, since the cache points into it
  const auto merge = [&](std::string_view word) { bpe_.encode(word, tokens); };
  const PreTokenizer::OnWord on_word = [&](std::string_view word, bool space_before) {
    if (space_before) return merge(std::string(" ").append(word));
    cache.encode(word, tokens, merge);
  };
  const auto on_token = [&](int64_t id) { tokens.push_back(id); };
  const auto on_text = [&](std::string_view part) { pre_tokenizer_.cut(part, on_word); };
  added_.cut(text, on_token, [&](std::string_view part) {
    if (nfc_) part = normalised.emplace_back(nfc(part));
    added_normalized_.cut(part, on_token, on_text);
  });
  return tokens;
}

std::string BpeTokenizer::decode(const std::vector<int64_t>& tokens) const {
  std::string text;
  for (const int64_t token : tokens) {
    if (token < 0) throw ConfigError("token: expected at least 0, got {}", token);
    if (token != files_.end_of_document) texts_.append(token, text);
  }
  return text;
}

}  // namespace

std::unique_ptr<Tokenizer> make_bpe_tokenizer(TokenizerSpec spec, BpeTokenizerFiles files) {
  return std::make_unique<BpeTokenizer>(std::move(spec), std::move(files));
}

}  // namespace parlat
