#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "parlat/tensor/shape.h"

namespace parlat {

// {"bytes": 1234, "xxh3": "16 digits"}: a file's size and its XXH3 of 64 bits, which tells a damaged file or one in
// another's place, not a forged one. Reads it once, block by block, as fast as it comes from memory. DataError.
nlohmann::json checksum(const std::filesystem::path& path);

// The 16 digits of the bytes of contiguous tensors, one after the other in the order of their names.
std::string checksum(const std::map<std::string, Tensor>& tensors);

}  // namespace parlat
