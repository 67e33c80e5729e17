#pragma once

#include <string>

namespace parlat {

// Lines for the person who waits, on stderr, never mixed with tables or JSON on stdout.
void log_info(const std::string& line);
void log_warning(const std::string& line);
// --quiet: warnings only.
void set_quiet(bool quiet);

}  // namespace parlat
