#pragma once

#include "parlat/io/json_node.h"
#include "parlat/io/pre_tokenizer.h"

namespace parlat {

// "pre_tokenizer" of tokenizer.json: Split, Digits, Punctuation, and ByteLevel as the last, in Sequences or not. Throws
// DataError for others.
PreTokenizer parse_pre_tokenizer(const JsonNode& node);

}  // namespace parlat
