#include "parlat/io/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace parlat {

namespace {

size_t skip_ascii(std::string_view text, size_t i) {
  constexpr uint64_t kHighBits = 0x8080808080808080u;
  uint64_t word = 0;
  while (i + sizeof(word) <= text.size()) {
    std::memcpy(&word, text.data() + i, sizeof(word));
    if ((word & kHighBits) != 0) break;
    i += sizeof(word);
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

size_t utf8_character_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) -> unsigned {
    return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0;
  };
  const auto continues = [&](size_t k) { return (byte(k) & 0xC0u) == 0x80u; };
  const unsigned lead = byte(0), second = byte(1);
  if (lead < 0x80) return i < text.size() ? 1 : 0;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool overlong = lead == 0xE0 && second < 0xA0, surrogate = lead == 0xED && second > 0x9F;
    return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && second < 0x90, beyond = lead == 0xF4 && second > 0x8F;
    return continues(1) && continues(2) && continues(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

size_t utf8_partial_length(std::string_view text, size_t i) {
  if (utf8_character_length(text, i) > 0) return 0;
  for (size_t length = std::min<size_t>(3, text.size() - i); length > 0; --length) {
    // Only second bytes have ranges of their own, and these two reach into all of them.
    for (const char continuation : {'\x80', '\xBF'}) {
      std::string whole(text.substr(i, length));
      whole.resize(4, continuation);
      if (utf8_character_length(whole, 0) > length) return length;
    }
  }
  return 0;
}

std::optional<size_t> find_invalid_utf8(std::string_view text) {
  for (size_t i = skip_ascii(text, 0); i < text.size(); i = skip_ascii(text, i)) {
    const size_t length = utf8_character_length(text, i);
    if (length == 0) return i;
    i += length;
  }
  return std::nullopt;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string valid;
  while (const auto invalid = find_invalid_utf8(text)) {
    valid.append(text, 0, *invalid).append("\xEF\xBF\xBD");
    text.remove_prefix(*invalid + std::max<size_t>(1, utf8_partial_length(text, *invalid)));
  }
  return valid.append(text);
}

}  // namespace parlat
