#include "parlat/io/byte_alphabet.h"

#include <array>

namespace parlat {

namespace {

constexpr unsigned kAlphabetEnd = 0x100 + 68;

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

// The code point of each byte, and the byte of each code point (-1: none).
struct Tables {
  std::array<unsigned, 256> code_points = {};
  std::array<int, kAlphabetEnd> bytes = {};
};

constexpr Tables make_tables() {
  Tables tables;
  tables.bytes.fill(-1);
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const unsigned code_point = stands_for_itself(byte) ? byte : next++;
    tables.code_points[byte] = code_point;
    tables.bytes[code_point] = static_cast<int>(byte);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::string byte_character(unsigned char byte) {
  const unsigned code_point = kTables.code_points[byte];
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

std::optional<std::string> bytes_of_characters(std::string_view characters) {
  std::string bytes;
  for (size_t i = 0; i < characters.size(); ++i) {
    unsigned code_point = static_cast<unsigned char>(characters[i]);
    if (code_point >= 0x80) {
      // Two bytes reach to U+07FF, further than the alphabet does.
      if ((code_point & 0xE0) != 0xC0 || i + 1 == characters.size()) return std::nullopt;
      code_point = (code_point & 0x1F) << 6 | (static_cast<unsigned char>(characters[++i]) & 0x3F);
    }
    if (code_point >= kAlphabetEnd || kTables.bytes[code_point] < 0) return std::nullopt;
    bytes += static_cast<char>(kTables.bytes[code_point]);
  }
  return bytes;
}

}  // namespace parlat
