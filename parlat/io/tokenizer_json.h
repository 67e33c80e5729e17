#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "parlat/io/added_tokens.h"
#include "parlat/io/bpe.h"
#include "parlat/io/pre_tokenizer.h"

namespace parlat {

// What tokenizer.json says, checked.
struct TokenizerSpec {
  struct Token {
    int64_t id;
    std::string text;                          // as the file writes it
    bool in_vocabulary = true, added = false;  // or both; added ones are text, others in byte_alphabet.h's alphabet
  };
  std::vector<Token> tokens;  // by id, each of which is there once and below kMostTokens
  std::vector<Bpe::Merge> merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added_tokens;
  bool nfc = false;
  PreTokenizer pre_tokenizer;
  std::vector<int64_t> prefix;

  static constexpr int64_t kMostTokens = int64_t{1} << 22;
};

// Supported are byte-level byte pair encodings: model BPE; normalizer NFC or none; pre-tokenizers Split, Digits,
// Punctuation and ByteLevel, the last of them ByteLevel; post-processors for what they put in front of a text; decoder
// ByteLevel. Throws DataError, beginning with `name`, for all else and for what contradicts itself.
TokenizerSpec parse_tokenizer_json(const nlohmann::json& file, const std::string& name);

}  // namespace parlat
