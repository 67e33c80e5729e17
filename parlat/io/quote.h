#pragma once

#include <string>
#include <string_view>

namespace parlat {

// Text out of a file for an error message: quoted, in ASCII, on one line, cut after 80 bytes.
std::string quote(std::string_view text);

}  // namespace parlat
