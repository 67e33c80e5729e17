#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace parlat {

// {"bytes": 1234, "xxh3": "16 digits"}: a file's size and its XXH3 of 64 bits, which tells a damaged file or one in
// another's place, not a forged one. Reads it once, block by block, as fast as it comes from memory. DataError.
nlohmann::json checksum(const std::filesystem::path& path);

}  // namespace parlat
