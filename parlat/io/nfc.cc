#include "parlat/io/nfc.h"

#include <utf8proc.h>

#include <cstdlib>
#include <memory>

#include "parlat/base/error.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

void append_nfc(std::string_view valid, std::string& normalised) {
  if (valid.empty()) return;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(valid.data()), static_cast<utf8proc_ssize_t>(valid.size()),
                   &result, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(result, std::free);
  PARLAT_ASSERT(length >= 0, "NFC of {} bytes: {}", valid.size(), utf8proc_errmsg(length));
  normalised.append(reinterpret_cast<const char*>(result), static_cast<size_t>(length));
}

}  // namespace

std::string nfc(std::string_view text) {
  std::string normalised;
  while (const auto invalid = find_invalid_utf8(text)) {
    append_nfc(text.substr(0, *invalid), normalised);
    normalised += text[*invalid];
    text.remove_prefix(*invalid + 1);
  }
  append_nfc(text, normalised);
  return normalised;
}

}  // namespace parlat
