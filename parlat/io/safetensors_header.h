#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parlat/io/safetensors.h"

namespace parlat {

struct SafetensorsHeader {
  std::map<std::string, SafetensorsFile::Entry> entries;
  std::map<std::string, std::string> metadata;
};

// Parses the JSON of a safetensors header, whose data section has data_bytes bytes, without building a document: memory
// stays in proportion to the tensors named. Throws DataError, beginning with `name`, for everything that is not exactly
// the format: other keys, dtypes that parlat lacks, sizes that overflow or do not match, overlaps, holes, duplicates.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& name);

// "F32"; nothing for dtypes outside the format.
std::optional<std::string_view> safetensors_dtype(at::ScalarType dtype);

}  // namespace parlat
