#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace parlat {

// The offset of the first byte that is not part of valid UTF-8 (overlong forms, surrogates, beyond U+10FFFF and cut
// characters are invalid; Unicode 15, table 3-7), or nothing. ASCII runs eight bytes a step.
std::optional<size_t> find_invalid_utf8(std::string_view text);

// Bytes of the valid character that starts at text[i]; 0 where there is none.
size_t utf8_character_length(std::string_view text, size_t i);

// Bytes at text[i] that begin a character which lacks its end; 0 where text[i] begins none, or a whole one. One U+FFFD
// stands for these, or for one byte that begins none (Unicode 15, chapter 3.9).
size_t utf8_partial_length(std::string_view text, size_t i);

// The text with U+FFFD for all that is not UTF-8.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace parlat
