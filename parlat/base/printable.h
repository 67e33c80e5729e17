#pragma once

#include <string>
#include <string_view>

namespace parlat {

// Text that may come from a file, as a terminal may have it: control characters (C0, DEL, and C1 in UTF-8) become \x1b.
std::string printable(std::string_view text);

}  // namespace parlat
