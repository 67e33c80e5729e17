// tokenizer.json: a tokenizer that encodes any bytes, or an error of one line. The rest of the input behind a NUL is
// text.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/io/bpe_tokenizer.h"
#include "parlat/io/utf8.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void use(const parlat::Tokenizer& tokenizer, const std::string& text) {
  const std::vector<int64_t> tokens = tokenizer.encode(text);
  parlat::TextStream stream(tokenizer);
  std::string streamed;
  for (const int64_t token : tokens) {
    require(0 <= token && token < tokenizer.vocab_size());
    streamed += stream.push(token);
  }
  streamed += stream.finish();
  require(streamed == parlat::replace_invalid_utf8(tokenizer.decode(tokens)));
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  const std::string file = input.substr(0, input.find('\0'));
  const std::string text = file.size() == size ? "" : input.substr(file.size() + 1);
  try {
    const auto tokenizer =
        parlat::make_bpe_tokenizer(parlat::parse_tokenizer_json(parlat::parse_json(file, "input"), "input"),
                                   {.name = "input", .files = {}, .end_of_document = {}});
    use(*tokenizer, "ab  abc 123 \xE4\xB8\xAD\xE4\xB8 <s>ab<s> \xFF\n\n'ab");
    use(*tokenizer, text);
  } catch (const parlat::Error& error) {
    require(std::string(error.what()).find('\n') == std::string::npos);
    require(error.exit_code() == 2 || error.exit_code() == 3);
  }
  return 0;
}
