#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parlat/io/atomic_file.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// A memory-mapped safetensors file, distrusted: header length against the file and a cap, dtypes, shapes and offsets
// against each other, no overlap, no hole, nothing after the end; checked before anything is allocated. DataError.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  struct Entry {
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape;
    int64_t begin = 0, end = 0;  // in the data section
  };
  const std::map<std::string, Entry>& entries() const;
  const std::map<std::string, std::string>& metadata() const;
  // A view of the mapped file; keeps the mapping alive. Read-only: clone before writing.
  Tensor tensor(const std::string& name) const;

 private:
  struct Mapping;
  std::shared_ptr<Mapping> mapping_;
};

// Writes atomically (temporary name, fsync, rename). Throws DataError (disk full, no permission); the old file then
// stays.
void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The same into a file that the caller commits: several files can then appear together, or none.
void stage_safetensors(AtomicFile& file, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace parlat
