#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace parlat {

// The offset of the first byte that is not part of valid UTF-8 (overlong forms, surrogates, beyond U+10FFFF and cut
// characters are invalid; Unicode 15, table 3-7), or nothing. ASCII runs eight bytes a step.
std::optional<size_t> find_invalid_utf8(std::string_view text);

}  // namespace parlat
