#include "parlat/io/tokenizer.h"

#include "parlat/base/error.h"

namespace parlat {

namespace {

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
  std::string name() const override { return "bytes"; }

 private:
  static constexpr int64_t kEndOfDocument = 256;
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

}  // namespace parlat
