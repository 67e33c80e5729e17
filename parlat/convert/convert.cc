#include "parlat/convert/convert.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "parlat/base/error.h"
#include "parlat/config/layout.h"
#include "parlat/config/names.h"
#include "parlat/convert/layer_walk.h"
#include "parlat/convert/rotation.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/files.h"
#include "parlat/weights/checkpoint_files.h"
#include "parlat/weights/shard_set.h"

namespace parlat {

namespace {

constexpr std::array<std::pair<Transform, std::string_view>, 3> kTransforms = {
    {{Transform::kHadamard, "hadamard"}, {Transform::kPca, "pca"}, {Transform::kBalanced, "balanced"}}};

// What a model's folder holds besides weights and configuration, and what a rotated copy therefore needs too.
constexpr std::array kCompanions = {"generation_config.json",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "chat_template.jinja",
                                    "vocab.json",
                                    "merges.txt"};

bool same_folder(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored);
}

// A copy of the model, rotated layer by layer: a shard a layer, and one for what is outside the layers.
class RotatedCopy {
 public:
  RotatedCopy(const ConvertOptions& options, const ModelConfig& config, CheckpointWriter& writer)
      : dtypes_(stored_dtypes(options.model, config)), writer_(writer) {
    ModelWeights weights;
    add(load_rows(
        options.model, config, [](const std::string& name) { return !name.starts_with("model.layers."); }, weights));
  }

  void add_layer(const WalkedLayer& layer, const Tensor& basis_LL) {
    rotate_weights(basis_LL, layer.weights.mla);
    add(layer.rows);
    fingerprint_.add(layer.weights.mla.w_dkv);
  }

  std::string fingerprint() const { return fingerprint_.text(); }

 private:
  // Each tensor takes its stored dtype in the place of its fp32 values, so that nothing is in memory twice. fp8 becomes
  // bf16: a rotated block has no scale of its own.
  void add(const std::vector<WeightRow>& rows) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const WeightRow& row : rows) {
      const at::ScalarType stored = dtypes_.at(row.name);
      *row.tensor = row.tensor->to(stored == at::kFloat8_e4m3fn ? at::kBFloat16 : stored).contiguous();
      tensors.emplace_back(row.name, *row.tensor);
    }
    writer_.add_shard(tensors);
  }

  std::map<std::string, at::ScalarType> dtypes_;
  CheckpointWriter& writer_;
  LatentFingerprint fingerprint_;
};

void check(const ConvertOptions& options, const ModelConfig& config) {
  for (const int64_t groups : options.groups) {
    if (groups < 2 || !can_place({DecodeLayout::kTpla, groups}, config.mla.dims, static_cast<int>(groups))) {
      throw ConfigError("groups: expected 2 to the latent's {} columns, got {}", config.mla.dims.d_latent, groups);
    }
    if (const auto times = std::count(options.groups.begin(), options.groups.end(), groups); times > 1) {
      throw ConfigError("groups: expected every number once, got {} {} times", groups, times);
    }
  }
  if (options.transform != Transform::kBalanced && same_folder(options.model, options.out)) {
    throw ConfigError("out: expected another folder than the model's, since {} changes its weights, got {}",
                      name(options.transform), options.out.string());
  }
  const auto tokens = static_cast<int64_t>(options.windows.size() * options.windows.front().size());
  if (options.transform == Transform::kPca && tokens <= config.mla.dims.d_latent) {
    throw ConfigError("calibration: expected more tokens for pca than the latent's {} columns, got {}",
                      config.mla.dims.d_latent, tokens);
  }
  check_weights(options.model, config);
}

// What makes two checkpoints ones of the same model: all but how its weights are stored.
nlohmann::json shape_of(const ModelConfig& config) {
  nlohmann::json hf = to_hf_json(config);
  for (const char* stored : {"dtype", "torch_dtype", "quantization_config"}) hf.erase(stored);
  return hf;
}

// A folder that takes no files, or that holds another model, is found out before the work is done.
void require_writable(const ConvertOptions& options, const ModelConfig& config) {
  create_folders(options.out);
  std::error_code ignored;
  if (std::filesystem::exists(options.out / "config.json", ignored) &&
      shape_of(load_model_config(options.out.string())) != shape_of(config)) {
    throw ConfigError("out: expected a new folder or one with {} converted before, got {}, which holds another model",
                      options.model.string(), options.out.string());
  }
  const AtomicFile tried(options.out / slice_file_name(options.groups.front()));
}

class Conversion {
 public:
  Conversion(const ConvertOptions& options, const ModelConfig& config) : options_(options), config_(config) {
    check(options, config);
    require_writable(options, config);
    lock_.emplace(options.out);
    files_.resize(options.groups.size());
    for (SliceFile& file : files_) file.transform = name(options.transform);
    const bool rotates = options.transform != Transform::kBalanced;
    writer_.emplace(options.out, rotates ? config.n_layers + 1 : 0);
    if (rotates) copy_.emplace(options, config, *writer_);
  }

  void visit(const WalkedLayer& layer) {
    const LayerSamples samples = layer_samples(layer.weights.mla, layer.x_BSD);
    const double variance = samples.c_kv().to(at::kDouble).var().item<double>();
    if (!std::isfinite(variance) || variance == 0) {
      throw DataError("{}: layer {}: expected weights that give latents which vary, got a variance of {}",
                      options_.model.string(), layer.index, variance);
    }
    copy_ ? copy_->add_layer(layer, rotate_layer(layer.index, samples)) : balance_layer(layer.index, samples);
  }

  std::vector<ConvertedLayer> finish() {
    if (!same_folder(options_.model, options_.out)) add_files();
    const std::string model = copy_ ? copy_->fingerprint() : latent_fingerprint(options_.model);
    for (size_t i = 0; i < files_.size(); ++i) {
      files_[i].model = model;
      stage_slices(writer_->stage(slice_file_name(options_.groups[i])), files_[i]);
    }
    copy_ ? writer_->finish(config_) : writer_->commit();
    remove_stale_slices(model);
    return std::move(layers_);
  }

 private:
  // Slices that an earlier conversion left, of weights that are no more.
  void remove_stale_slices(const std::string& model) const {
    for (int64_t groups = 2; groups <= config_.mla.dims.d_latent; ++groups) {
      const std::filesystem::path path = options_.out / slice_file_name(groups);
      std::error_code ignored;
      if (!std::filesystem::exists(path, ignored)) continue;
      const std::string theirs = slice_model(path);
      if (!theirs.empty() && theirs != model) std::filesystem::remove(path, ignored);
    }
  }

  // The model's other files, as they are.
  void add_files() {
    std::vector<std::string> names(kCompanions.begin(), kCompanions.end());
    if (!copy_) {
      std::vector<std::string> problems;  // there were none
      for (const std::string& name : ShardSet(options_.model, problems).files()) names.push_back(name);
      names.emplace_back("config.json");
    }
    std::error_code ignored;
    for (const std::string& name : names) {
      if (std::filesystem::exists(options_.model / name, ignored)) writer_->add_file(options_.model / name);
    }
  }

  // Returns the basis.
  Tensor rotate_layer(int64_t layer, const LayerSamples& samples) {
    Tensor basis_LL = options_.transform == Transform::kPca
                          ? pca_basis(samples)
                          : hadamard_basis(config_.mla.dims.d_latent, options_.balanced.seed);
    const Tensor variance_L = variance_in(basis_LL, samples);
    for (size_t i = 0; i < files_.size(); ++i) {
      files_[i].layers.push_back(rotated_slices(variance_L, options_.groups[i]));
      layers_.push_back({.layer = layer, .groups = options_.groups[i]});
    }
    return basis_LL;
  }

  void balance_layer(int64_t layer, const LayerSamples& samples) {
    for (size_t i = 0; i < files_.size(); ++i) {
      BalancedOptions balanced = options_.balanced;
      balanced.groups = options_.groups[i];
      BalancedResult result = balance(samples, balanced);
      files_[i].layers.push_back(std::move(result.slices));
      layers_.push_back({layer, balanced.groups, result.error_before, result.error_after});
    }
  }

  const ConvertOptions& options_;
  const ModelConfig& config_;
  std::optional<FolderLock> lock_;
  std::optional<CheckpointWriter> writer_;
  std::optional<RotatedCopy> copy_;
  std::vector<SliceFile> files_;
  std::vector<ConvertedLayer> layers_;
};

}  // namespace

std::string_view name(Transform transform) { return name_in(kTransforms, transform); }
Transform parse_transform(std::string_view text) { return parse_in(kTransforms, "transform", text); }

std::vector<ConvertedLayer> convert(const ConvertOptions& options, const ModelConfig& config,
                                    const std::function<void(int64_t)>& progress) {
  Conversion conversion(options, config);
  walk_layers(
      options.model, config, options.windows, [&](const WalkedLayer& layer) { conversion.visit(layer); }, progress);
  return conversion.finish();
}

}  // namespace parlat
