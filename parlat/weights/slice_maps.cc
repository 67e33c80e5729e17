#include "parlat/weights/slice_maps.h"

#include <ATen/ops/eye.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/base/range.h"
#include "parlat/io/checksum.h"
#include "parlat/io/safetensors.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/shard_set.h"

namespace parlat {

namespace {

constexpr const char* kFormat = "parlat slices 2";

std::string map_name(int64_t layer, int64_t group, const char* map) {
  return fmt::format("layers.{}.slices.{}.{}", layer, group, map);
}

std::string text_of(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? "" : found->second;
}

class Reader {
 public:
  Reader(const std::filesystem::path& path, const ModelConfig& config) : path_(path), config_(config), file_(path) {}

  SliceFile read() {
    if (text("format") != kFormat) refuse("format", fmt::format("'{}'", kFormat), text("format"));
    const int64_t groups = number("groups");
    SliceFile slices{.model = text("model"), .transform = text("transform"), .layers = {}};
    for (int64_t layer = 0; layer < config_.n_layers; ++layer) {
      auto& of_layer = slices.layers.emplace_back();
      for (int64_t group = 0; group < groups; ++group) {
        const Tensor store = map(layer, group, "store", kAny);
        of_layer.push_back({store, map(layer, group, "key", store.size(1)), map(layer, group, "value", store.size(1))});
      }
    }
    check_names(3 * config_.n_layers * groups);
    return slices;
  }

 private:
  // Of the tensors, those of the model's layers are `expected`; and all of them are as they were written.
  void check_names(int64_t expected) const {
    constexpr std::string_view kLayers = "layers.";
    std::map<std::string, Tensor> tensors;
    int64_t own = 0;
    for (const auto& [name, entry] : file_.entries()) {
      int64_t layer = -1;
      if (name.starts_with(kLayers)) std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
      own += layer < config_.n_layers ? 1 : 0;
      tensors[name] = file_.tensor(name);
    }
    if (own != expected) {
      refuse(fmt::format("tensors of {} layers", config_.n_layers), fmt::format("{}, 3 a layer and slice", expected),
             fmt::format("{}", own));
    }
    if (const std::string found = checksum(tensors); found != text("xxh3")) {
      refuse("tensors", fmt::format("a checksum of {}", text("xxh3")), found + ": the file is damaged");
    }
  }

  std::string text(const std::string& key) const { return text_of(file_, key); }

  int64_t number(const std::string& key) const {
    const std::string value = text(key);
    int64_t result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < 1 ||
        result > config_.mla.dims.d_latent) {
      refuse(key, fmt::format("1 to {}", config_.mla.dims.d_latent), "'" + value + "'");
    }
    return result;
  }

  Tensor map(int64_t layer, int64_t group, const char* which, int64_t width) const {
    const std::string name = map_name(layer, group, which);
    const auto found = file_.entries().find(name);
    if (found == file_.entries().end()) refuse(name, fmt::format("it for each of {} layers", config_.n_layers), "none");
    const auto& [dtype, shape, begin, end] = found->second;
    const int64_t d_latent = config_.mla.dims.d_latent;
    const bool fits = shape.size() == 2 && shape[0] == d_latent && 1 <= shape[1] && shape[1] <= d_latent &&
                      (width == kAny || shape[1] == width) && dtype == at::kFloat;
    if (!fits) {
      refuse(name, fmt::format("fp32 {}", shape_text({d_latent, width})),
             fmt::format("{} {}", parlat::name(dtype), shape_text(shape)));
    }
    Tensor values = file_.tensor(name).clone();
    if (!values.isfinite().all().item<bool>()) refuse(name, "finite numbers", "NaN or infinity");
    return values;
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& expected, const std::string& got) const {
    throw DataError("{}: {}: expected {}, got {}", path_.string(), what, printable(expected), printable(got));
  }

  std::filesystem::path path_;
  const ModelConfig& config_;
  SafetensorsFile file_;
};

}  // namespace

SliceMaps plain_slice(int64_t d_latent, int64_t groups, int64_t group) {
  const Range columns = even_share(d_latent, groups, group);
  const Tensor map = at::eye(d_latent).narrow(1, columns.begin, columns.size()).contiguous();
  return {map, map, map};
}

void LatentFingerprint::add(const Tensor& w_dkv) {
  constexpr size_t kMost = size_t{1} << 16;
  hash_ = derive_seed(hash_, {static_cast<const char*>(w_dkv.const_data_ptr()), std::min(w_dkv.nbytes(), kMost)});
}

std::string LatentFingerprint::text() const { return fmt::format("{:016x}", hash_); }

std::string latent_fingerprint(const std::filesystem::path& directory) {
  std::vector<std::string> problems;
  const ShardSet shards(directory, problems);
  if (!problems.empty()) throw DataError("{}: {}", directory.string(), printable(problems.front()));
  const auto name = [](int64_t layer) {
    return fmt::format("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", layer);
  };
  LatentFingerprint fingerprint;
  for (int64_t layer = 0; shards.contains(name(layer)); ++layer) fingerprint.add(shards.tensor(name(layer)));
  return fingerprint.text();
}

std::string slice_file_name(int64_t groups) { return fmt::format("slices-{}.safetensors", groups); }

SliceFile load_slices(const std::filesystem::path& path, const ModelConfig& config) {
  return Reader(path, config).read();
}

std::string slice_transform(const std::filesystem::path& path) { return text_of(SafetensorsFile(path), "transform"); }
std::string slice_model(const std::filesystem::path& path) { return text_of(SafetensorsFile(path), "model"); }

void save_slices(const std::filesystem::path& path, const SliceFile& slices) {
  AtomicFile file(path);
  stage_slices(file, slices);
  file.commit();
}

void stage_slices(AtomicFile& file, const SliceFile& slices) {
  std::map<std::string, Tensor> tensors;
  for (size_t layer = 0; layer < slices.layers.size(); ++layer) {
    for (size_t group = 0; group < slices.layers[layer].size(); ++group) {
      const SliceMaps& maps = slices.layers[layer][group];
      for (const auto& [which, map] :
           {std::pair{"store", maps.store_Lw}, std::pair{"key", maps.key_Lw}, std::pair{"value", maps.value_Lw}}) {
        tensors[map_name(layer, group, which)] = map.to(at::kFloat).contiguous();
      }
    }
  }
  stage_safetensors(file, {tensors.begin(), tensors.end()},
                    {{"format", kFormat},
                     {"model", slices.model},
                     {"transform", slices.transform},
                     {"groups", fmt::format("{}", slices.groups())},
                     {"xxh3", checksum(tensors)}});
}

}  // namespace parlat
