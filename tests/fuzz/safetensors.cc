// Safetensors files: tensors within the file, or a DataError.
#include "parlat/io/safetensors.h"

#include "tests/fuzz/safetensors_input.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  as_file_and_as_header(data, size, std::string(64, 'x'), [](const std::string& path, size_t bytes) {
    const parlat::SafetensorsFile file(path);
    uint64_t sum = 0;
    for (const auto& [name, entry] : file.entries()) {
      const at::Tensor tensor = file.tensor(name);
      require(tensor.nbytes() <= bytes);
      const auto* const first = static_cast<const uint8_t*>(tensor.const_data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) sum += first[i];
    }
    require(sum <= 255 * bytes);
  });
  return 0;
}
