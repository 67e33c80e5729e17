// Files of slices: maps that fit the model, or a DataError of one line. As a header it has as many bytes of data behind
// it as two slices of one layer take.
#include "parlat/weights/slice_maps.h"
#include "tests/fuzz/safetensors_input.h"

namespace {

constexpr int64_t kLatent = 4, kDataBytes = 2 * 3 * kLatent * (kLatent / 2) * 4;

parlat::ModelConfig one_layer() {
  parlat::ModelConfig config;
  config.n_layers = 1;
  config.mla.dims.d_latent = kLatent;
  return config;
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const parlat::ModelConfig config = one_layer();
  as_file_and_as_header(data, size, std::string(kDataBytes, '1'), [](const std::string& path, size_t) {
    const parlat::SliceFile file = parlat::load_slices(path, config);
    require(file.layers.size() == 1 && 1 <= file.groups() && file.groups() <= kLatent);
    for (const parlat::SliceMaps& maps : file.layers[0]) {
      for (const at::Tensor& map : {maps.store_Lw, maps.key_Lw, maps.value_Lw}) {
        require(map.sizes() == at::IntArrayRef({kLatent, maps.width()}) && map.isfinite().all().item<bool>());
      }
    }
  });
  return 0;
}
