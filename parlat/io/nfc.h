#pragma once

#include <string>
#include <string_view>

namespace parlat {

// Normalisation form C (Unicode's annex 15) of the valid stretches of a text; bytes that are no UTF-8 stay between
// them.
std::string nfc(std::string_view text);

}  // namespace parlat
