#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace parlat {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;  // the largest token, and one
  // Any bytes; those that are not UTF-8 come back from decode too. Empty text has no tokens.
  virtual std::vector<int64_t> encode(std::string_view text) const = 0;
  // End of document is no text. Tokens that no text names (reserved ones) become "<|id 12345|>". Throws ConfigError for
  // negative numbers, and for those that are no tokens where all have a meaning.
  virtual std::string decode(const std::vector<int64_t>& tokens) const = 0;
  // What a document ends with. Throws ConfigError where the tokenizer's files name none.
  virtual int64_t end_of_document() const = 0;
  // What belongs in front of every text that a model is given (begin of sentence), and encode leaves out.
  virtual std::vector<int64_t> prefix() const = 0;
  virtual std::string name() const = 0;
  // The files, by name, that make a model's folder read back as this tokenizer, by transformers too.
  virtual std::map<std::string, std::string> files() const = 0;
};

// Bytes as tokens 0..255, end of document 256, which no text encodes to.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

// The tokenizer of a Hugging Face folder: byte-level byte pair encoding out of tokenizer.json, with the tokens that the
// `tokenizers` package gives. Of tokenizer_config.json and config.json only the end of a document is taken, never a
// class: those of published models are wrong often enough. Throws DataError where files are missing, broken, or ask for
// what is not supported.
std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& model_directory);

// Text of tokens that come one by one: characters whose bytes are spread over tokens appear when they are whole. All
// that push and finish return, one after the other, is what decode gives, with U+FFFD for what is no UTF-8 there.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  std::string push(int64_t token);
  std::string finish();  // what was held back, at the end of the text

 private:
  const Tokenizer* tokenizer_;
  std::string held_;  // at most 3 bytes, which begin a character
};

}  // namespace parlat
