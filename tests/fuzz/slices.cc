// Files of slices: maps that fit the model, or a DataError of one line. The input is tried as a whole file, and as the
// header of one with as many bytes of data as two slices of one layer take.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "parlat/base/error.h"
#include "parlat/weights/slice_maps.h"

namespace {

constexpr int64_t kLatent = 4, kDataBytes = 2 * 3 * kLatent * (kLatent / 2) * 4;

void require(bool holds) {
  if (!holds) std::abort();
}

void load(const std::string& bytes) {
  static const parlat::ModelConfig config = [] {
    parlat::ModelConfig c;
    c.n_layers = 1;
    c.mla.dims.d_latent = kLatent;
    return c;
  }();
  const int fd = ::memfd_create("input", 0);
  require(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  try {
    const parlat::SliceFile file = parlat::load_slices("/proc/self/fd/" + std::to_string(fd), config);
    require(file.layers.size() == 1 && 1 <= file.groups() && file.groups() <= kLatent);
    for (const parlat::SliceMaps& maps : file.layers[0]) {
      for (const at::Tensor& map : {maps.store_Lw, maps.key_Lw, maps.value_Lw}) {
        require(map.sizes() == at::IntArrayRef({kLatent, maps.width()}) && map.isfinite().all().item<bool>());
      }
    }
  } catch (const parlat::DataError& error) {
    require(std::string(error.what()).find('\n') == std::string::npos);
  }
  ::close(fd);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  load(input);
  const uint64_t length = size;
  std::string whole(sizeof(length), '\0');
  std::memcpy(whole.data(), &length, sizeof(length));
  load(whole + input + std::string(kDataBytes, '1'));
  return 0;
}
