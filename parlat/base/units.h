#pragma once

#include <cstdint>
#include <string>

namespace parlat {

// "1.5 kB", "146.8 MB": powers of 1000, as network figures and the papers' tables count.
std::string format_bytes(double bytes);

// "850 ms", "12.3 s", "4 min 05 s".
std::string format_seconds(double seconds);

// "1,234,567".
std::string format_count(int64_t count);

}  // namespace parlat
