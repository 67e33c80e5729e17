// Safetensors files: tensors within the file, or a DataError. The input is tried as a whole file, and as the header of
// one with 64 bytes of data, since few mutations keep the length at the front right.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "parlat/base/error.h"
#include "parlat/io/safetensors.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void open_file(const std::string& bytes) {
  const int fd = ::memfd_create("input", 0);
  require(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  try {
    const parlat::SafetensorsFile file("/proc/self/fd/" + std::to_string(fd));
    uint64_t sum = 0;
    for (const auto& [name, entry] : file.entries()) {
      const at::Tensor tensor = file.tensor(name);
      require(tensor.nbytes() <= bytes.size());
      const auto* const first = static_cast<const uint8_t*>(tensor.const_data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) sum += first[i];
    }
    require(sum <= 255 * bytes.size());
  } catch (const parlat::DataError& error) {
    require(std::string(error.what()).find('\n') == std::string::npos);
  }
  ::close(fd);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  open_file(input);
  const uint64_t length = size;
  std::string whole(sizeof(length), '\0');
  std::memcpy(whole.data(), &length, sizeof(length));
  open_file(whole + input + std::string(64, 'x'));
  return 0;
}
