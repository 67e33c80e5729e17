#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "parlat/io/tokenizer.h"
#include "parlat/io/tokenizer_json.h"

namespace parlat {

struct BpeTokenizerFiles {
  std::string name;                          // in errors and records
  std::map<std::string, std::string> files;  // Tokenizer::files()
  std::optional<int64_t> end_of_document;
};

// The steps of the `tokenizers` package in their order: added tokens, normaliser, added tokens looked for in normalised
// text, words, merges. Linear in the text, but for words beyond the cache: those cost O(n log n) each. Any number of
// threads may share it. encode leaves out prefix(); decode writes special tokens as their names.
std::unique_ptr<Tokenizer> make_bpe_tokenizer(TokenizerSpec spec, BpeTokenizerFiles files);

}  // namespace parlat
