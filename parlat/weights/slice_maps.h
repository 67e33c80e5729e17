#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/io/atomic_file.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// How one rank keeps a slice of the latent of one layer (docs/slicing.md): it stores z = store^T c_kv, scores with
// key z in place of c_kv, and hands back value z, a summand of c_kv. All [L, w] fp32, w the width of the slice.
struct SliceMaps {
  Tensor store_Lw, key_Lw, value_Lw;
  int64_t width() const { return store_Lw.size(1); }
};

// Consecutive columns of the latent as they are: slice `group` of `groups`.
SliceMaps plain_slice(int64_t d_latent, int64_t groups, int64_t group);

// What `parlat convert` writes beside a checkpoint: the maps of every layer and slice.
struct SliceFile {
  std::string model;                           // latent_fingerprint of the checkpoint they belong to; empty: of any
  std::string transform;                       // hadamard, pca, balanced
  std::vector<std::vector<SliceMaps>> layers;  // [layer][group]
  int64_t groups() const { return layers.empty() ? 0 : static_cast<int64_t>(layers.front().size()); }
};

// A number that tells checkpoints apart: a hash of the bytes of every layer's kv_a_proj_with_mqa, which slices are maps
// of (the first 64 KiB of each). Fine-tuning often leaves the first layers as they are.
class LatentFingerprint {
 public:
  void add(const Tensor& w_dkv);  // of the next layer, contiguous and in the dtype of the file
  std::string text() const;

 private:
  uint64_t hash_ = 0;
};
// DataError for weights that cannot be read.
std::string latent_fingerprint(const std::filesystem::path& directory);

// "slices-2.safetensors": the file of a model directory for so many groups.
std::string slice_file_name(int64_t groups);

// Throws DataError for a file that is broken or damaged (an XXH3 of its maps lies beside them), or of fewer layers or
// other widths than the model's. Layers behind the model's are skipped: a model may be cut to its first.
SliceFile load_slices(const std::filesystem::path& path, const ModelConfig& config);
// Of its header alone: hadamard, pca, balanced; and the fingerprint.
std::string slice_transform(const std::filesystem::path& path);
std::string slice_model(const std::filesystem::path& path);
// Atomically; DataError.
void save_slices(const std::filesystem::path& path, const SliceFile& slices);
// The same into a file that the caller commits.
void stage_slices(AtomicFile& file, const SliceFile& slices);

}  // namespace parlat
