#include "parlat/convert/convert.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <memory>
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

// fp8 weights are written in bf16: a rotated block has no scale of its own.
at::ScalarType stored_dtype(const std::filesystem::path& directory) {
  std::vector<std::string> problems;
  const ShardSet shards(directory, problems);
  const std::string name = "model.layers.0.self_attn.o_proj.weight";
  const at::ScalarType dtype = shards.contains(name) ? shards.tensor(name).scalar_type() : at::kFloat;
  return dtype == at::kFloat8_e4m3fn ? at::kBFloat16 : dtype;
}

bool same_folder(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored);
}

// A copy of the model, rotated layer by layer: a shard a layer, and one for what is outside the layers.
class RotatedCopy {
 public:
  RotatedCopy(const ConvertOptions& options, const ModelConfig& config)
      : options_(options),
        config_(config),
        dtype_(stored_dtype(options.model)),
        writer_(options.out, config.n_layers + 1) {
    add_rows([](const std::string& name) { return !name.starts_with("model.layers."); }, nullptr);
  }

  void add_layer(int64_t layer, const Tensor& basis_LL) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    add_rows([&](const std::string& name) { return name.starts_with(prefix); },
             [&](ModelWeights& weights) { rotate_weights(basis_LL, weights.layers[layer].mla); });
  }

  CheckpointWriter& writer() { return writer_; }

 private:
  void add_rows(const std::function<bool(const std::string&)>& wanted,
                const std::function<void(ModelWeights&)>& change) {
    ModelWeights weights;
    std::vector<WeightRow> rows = weight_table(config_, all_experts(config_), weights);
    std::erase_if(rows, [&](const WeightRow& row) { return !wanted(row.name); });
    load_weights(options_.model, config_, rows, dtype_);
    if (change) change(weights);
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const WeightRow& row : rows) tensors.emplace_back(row.name, row.tensor->contiguous());
    writer_.add_shard(tensors);
  }

  const ConvertOptions& options_;
  const ModelConfig& config_;
  at::ScalarType dtype_;
  CheckpointWriter writer_;
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
  check_weights(options.model, config);
}

// A folder that takes no files is found out before the work is done.
void require_writable(const ConvertOptions& options) {
  create_folders(options.out);
  const AtomicFile tried(options.out / slice_file_name(options.groups.front()));
}

// The model's other files, as they are.
void copy_files(const ConvertOptions& options, bool weights) {
  std::error_code ignored;
  std::vector<std::string> names(kCompanions.begin(), kCompanions.end());
  if (weights) {
    names.emplace_back("config.json");
    for (const auto& file : std::filesystem::directory_iterator(options.model)) {
      const std::string name = file.path().filename();
      const bool weight = name.starts_with("model") && name.find(".safetensors") != std::string::npos;
      if (weight) names.push_back(name);
    }
  }
  for (const std::string& name : names) {
    const std::filesystem::path from = options.model / name, to = options.out / name;
    if (!std::filesystem::exists(from, ignored)) continue;
    std::error_code error;
    std::filesystem::remove(to, ignored);
    // Weights take no room twice where links are possible; small files are copies that may be edited. A cache of
    // Hugging Face holds symbolic links, whose own hard link would point nowhere from here.
    const bool link = to.extension() == ".safetensors";
    if (link) std::filesystem::create_hard_link(std::filesystem::canonical(from), to, error);
    if (!link || error) std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing, error);
    if (error) throw DataError("{}: cannot be copied to {}: {}", from.string(), to.string(), error.message());
  }
}

class Conversion {
 public:
  Conversion(const ConvertOptions& options, const ModelConfig& config) : options_(options), config_(config) {
    check(options, config);
    require_writable(options);
    files_.resize(options.groups.size());
    for (SliceFile& file : files_) file.transform = name(options.transform);
    if (options.transform != Transform::kBalanced) copy_.emplace(options, config);
  }

  void visit(int64_t layer, const MlaWeights& weights, const Tensor& x_BSD) {
    const LayerSamples samples = layer_samples(weights, x_BSD);
    if (options_.transform == Transform::kBalanced) {
      balance_layer(layer, samples);
    } else {
      rotate_layer(layer, samples);
    }
  }

  std::vector<ConvertedLayer> finish() {
    if (copy_) {
      copy_->writer().finish(config_);
      copy_files(options_, /*weights=*/false);
    } else if (!same_folder(options_.model, options_.out)) {
      remove_weights();
      copy_files(options_, /*weights=*/true);
    }
    const std::string model = latent_fingerprint(options_.out);
    for (size_t i = 0; i < files_.size(); ++i) {
      files_[i].model = model;
      save_slices(options_.out / slice_file_name(options_.groups[i]), files_[i]);
    }
    return std::move(layers_);
  }

 private:
  // Of an earlier conversion into the same folder: readers would prefer or mix them.
  void remove_weights() const {
    std::error_code ignored;
    for (const auto& file : std::filesystem::directory_iterator(options_.out)) {
      const std::string name = file.path().filename();
      if (name.starts_with("model") && name.find(".safetensors") != std::string::npos) {
        std::filesystem::remove(file.path(), ignored);
      }
    }
  }

  void rotate_layer(int64_t layer, const LayerSamples& samples) {
    const int64_t d_latent = config_.mla.dims.d_latent;
    const Tensor basis_LL =
        options_.transform == Transform::kPca ? pca_basis(samples) : hadamard_basis(d_latent, options_.balanced.seed);
    copy_->add_layer(layer, basis_LL);
    const Tensor variance_L = variance_in(basis_LL, samples);
    for (size_t i = 0; i < files_.size(); ++i) {
      files_[i].layers.push_back(rotated_slices(variance_L, options_.groups[i]));
      layers_.push_back({.layer = layer, .groups = options_.groups[i]});
    }
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
      options.model, config, options.windows,
      [&](int64_t layer, const MlaWeights& weights, const Tensor& x_BSD) { conversion.visit(layer, weights, x_BSD); },
      progress);
  return conversion.finish();
}

}  // namespace parlat
