#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace parlat {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;
  virtual std::vector<int64_t> encode(std::string_view text) const = 0;
  // End of document is no text. Throws ConfigError for numbers that are no tokens.
  virtual std::string decode(const std::vector<int64_t>& tokens) const = 0;
  virtual int64_t end_of_document() const = 0;  // a token no text encodes to
  virtual std::string name() const = 0;
};

// Bytes as tokens 0..255, end of document 256.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

}  // namespace parlat
