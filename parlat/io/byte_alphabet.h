#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace parlat {

// The alphabet in which tokenizer.json writes the bytes of byte-level tokens, a printable character each (GPT-2's
// encoder.py): printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on.
std::string byte_character(unsigned char byte);  // as UTF-8

// The bytes that the characters stand for, or nothing where one is outside the alphabet.
std::optional<std::string> bytes_of_characters(std::string_view characters);

}  // namespace parlat
