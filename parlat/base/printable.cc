#include "parlat/base/printable.h"

#include <fmt/format.h>

namespace parlat {

std::string printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool c1 = byte == 0xC2 && 0x80 <= next && next < 0xA0;
    if (c1 || byte < 0x20 || byte == 0x7F) {
      shown += fmt::format("\\x{:02x}", c1 ? next : byte);
      i += c1;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace parlat
