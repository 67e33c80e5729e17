#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/weights/checkpoint_files.h"
#include "parlat/weights/shard_set.h"

namespace parlat {

namespace {

constexpr size_t kMostNamedProblems = 20;

// "a.b.experts.7.gate_proj.weight" split around its expert; nothing for other names.
struct ExpertName {
  std::string before = {};  // "a.b.experts."
  int64_t expert = 0;
  std::string weight = {};  // "gate_proj"
};

std::optional<ExpertName> split_expert_name(const std::string& name) {
  constexpr std::string_view kExperts = ".mlp.experts.", kWeight = ".weight";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos || !name.ends_with(kWeight)) return std::nullopt;
  ExpertName split{.before = name.substr(0, at + kExperts.size())};
  const char* end = name.data() + name.size();
  const auto [after, error] = std::from_chars(name.data() + split.before.size(), end, split.expert);
  if (error != std::errc() || after == end || *after != '.') return std::nullopt;
  split.weight = std::string(after + 1, end - kWeight.size());
  return split;
}

// transformers keeps the experts of a layer in memory as gate_up_proj [E, 2F, D] and down_proj [E, D, F], and some
// files hold them so: the tensor that a row of one expert is then part of.
std::string fused_name(const WeightRow& row) {
  const std::optional<ExpertName> split = split_expert_name(row.name);
  PARLAT_ASSERT(split, "{}", row.name);
  return split->before + (split->weight == "down_proj" ? "down_proj" : "gate_up_proj");
}

class Loader {
 public:
  Loader(const std::filesystem::path& directory, const ModelConfig& config, const std::vector<WeightRow>& table)
      : directory_(directory), config_(config), table_(table), shards_(directory, problems_) {}

  // Throws for everything wrong, before anything is allocated.
  void check() {
    sources_.reserve(table_.size());
    for (const WeightRow& row : table_) sources_.push_back(find(row));
    check_names();
    report();
  }

  void fill(at::ScalarType dtype) const {
    for (size_t i = 0; i < table_.size(); ++i) {
      const WeightRow& row = table_[i];
      row.set(read(sources_[i], row.part, row.keep_fp32 ? at::kFloat : dtype));
    }
  }

  // fp8 is a dtype too. After check().
  std::map<std::string, at::ScalarType> stored_dtypes() const {
    std::map<std::string, at::ScalarType> dtypes;
    for (size_t i = 0; i < table_.size(); ++i) dtypes[table_[i].name] = sources_[i].weight.scalar_type();
    return dtypes;
  }

  const std::vector<std::string>& skipped() const { return skipped_; }

 private:
  // Views of the file; undefined after noting a problem.
  struct Source {
    Tensor weight;
    Tensor scale;           // of fp8 weights: one number a block
    int64_t first_row = 0;  // the weight's in the matrix that was cut into blocks
  };

  // The part of a weight that the rank keeps, and nothing else of it.
  Tensor read(const Source& source, const std::optional<WeightPart>& part, at::ScalarType dtype) const {
    const Tensor weight = part ? part->of(source.weight) : source.weight;
    if (!source.scale.defined()) return weight.to(dtype, /*non_blocking=*/false, /*copy=*/true).contiguous();
    // The block of each row and column, wherever the part begins.
    const auto blocks = [&](int64_t dimension) {
      const int64_t begin =
          (part && part->dimension == dimension ? part->range.begin : 0) + (dimension == 0 ? source.first_row : 0);
      const int64_t size = (*config_.fp8_block)[dimension];
      return at::arange(begin, begin + weight.size(dimension), at::kLong).div(size, "floor");
    };
    const Tensor scale = source.scale.to(at::kFloat).index_select(0, blocks(0)).index_select(1, blocks(1));
    return weight.to(at::kFloat).mul_(scale).to(dtype);
  }

  Source find(const WeightRow& row) {
    if (shards_.contains(row.name)) return with_scale(row.name, row.shape);
    const std::string fused = row.expert ? fused_name(row) : row.name;
    if (shards_.contains(fused)) return part_of_fused(fused, row);
    if (!shards_.lost(row.name) && !shards_.lost(fused)) problems_.push_back(row.name + ": missing");
    return {};
  }

  Source part_of_fused(const std::string& fused, const WeightRow& row) {
    const ExpertName split = split_expert_name(row.name).value();
    const int64_t rows = row.shape[0], first_row = split.weight == "up_proj" ? rows : 0;
    const Source all =
        with_scale(fused, {config_.moe->n_routed, split.weight == "down_proj" ? rows : 2 * rows, row.shape[1]});
    if (!all.weight.defined()) return {};
    return {.weight = all.weight.select(0, split.expert).narrow(0, first_row, rows),
            .scale = all.scale.defined() ? all.scale.select(0, split.expert) : Tensor(),
            .first_row = first_row};
  }

  Tensor checked(const std::string& name, const std::vector<int64_t>& shape) {
    Tensor view = shards_.tensor(name);
    if (view.sizes() != at::IntArrayRef(shape)) {
      note_once(name, fmt::format("expected {}, got {} in {}", shape_text(shape), shape_text(view.sizes()),
                                  shards_.file_of(name)));
      return {};
    }
    const at::ScalarType dtype = view.scalar_type();
    const bool fp8 = dtype == at::kFloat8_e4m3fn && config_.fp8_block && shape.size() >= 2;
    if (!fp8 && dtype != at::kDouble && dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) {
      note_once(name, fmt::format("expected fp32, bf16, fp16 or fp64, got {} in {}", parlat::name(dtype),
                                  shards_.file_of(name)));
      return {};
    }
    return view;
  }

  // An fp8 weight comes with NAME_scale_inv, [rows / block, columns / block] rounded up, for each expert where it has
  // several: what its blocks are to be multiplied by, in fp32 or as powers of two in e8m0.
  Source with_scale(const std::string& name, const std::vector<int64_t>& shape) {
    const std::string scale_name = name + "_scale_inv";
    const Tensor weight = checked(name, shape);
    if (!weight.defined() || weight.scalar_type() != at::kFloat8_e4m3fn) return {.weight = weight, .scale = {}};
    if (!shards_.contains(scale_name)) {
      if (!shards_.lost(scale_name)) note_once(scale_name, "missing");
      return {};
    }
    std::vector<int64_t> expected = shape;
    for (size_t i = 0; i < 2; ++i) {
      int64_t& size = expected[shape.size() - 2 + i];
      size = (size + (*config_.fp8_block)[i] - 1) / (*config_.fp8_block)[i];
    }
    const Tensor scale = shards_.tensor(scale_name);
    const at::ScalarType dtype = scale.scalar_type();
    if (scale.sizes() != at::IntArrayRef(expected) ||
        (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kFloat8_e8m0fnu)) {
      note_once(scale_name, fmt::format("expected {} of fp32, bf16 or e8m0, got {} of {} in {}", shape_text(expected),
                                        shape_text(scale.sizes()), parlat::name(dtype), shards_.file_of(scale_name)));
      return {};
    }
    return {.weight = weight, .scale = scale};
  }

  void note_once(const std::string& name, const std::string& problem) {
    if (noted_.insert(name).second) problems_.push_back(name + ": " + problem);
  }

  void check_names() {
    // Experts of other ranks belong to the model too.
    ModelWeights unused;
    std::set<std::string> known;
    for (const WeightRow& row : weight_table(config_, all_experts(config_), unused)) {
      known.insert(row.name);
      if (row.expert && !shards_.contains(row.name)) known.insert(fused_name(row));
    }
    const std::string_view scale = config_.fp8_block ? "_scale_inv" : "";
    for (const std::string& name : shards_.names()) {
      const bool is_scale = !scale.empty() && name.ends_with(scale);
      if (known.contains(is_scale ? name.substr(0, name.size() - scale.size()) : name)) continue;
      if (is_skipped(name)) {
        skipped_.push_back(name);
      } else if (name == "lm_head.weight") {
        check_tied_head();
      } else if (noted_.insert(name).second) {
        problems_.push_back(fmt::format("{}: unexpected, in {}", name, shards_.file_of(name)));
      }
    }
  }

  // Layers that the config's file counts and a caller has cut off, multi-token-prediction layers, which have a
  // projection that others lack, precomputed frequencies and the other parts of a multimodal model.
  bool is_skipped(const std::string& name) const {
    if (name.ends_with("rotary_emb.inv_freq")) return true;
    constexpr std::string_view kLayers = "model.layers.";
    if (name.starts_with(kLayers)) {
      int64_t layer = -1;
      std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
      const bool cut_off = config_.hf.is_object() && layer < config_.hf.value("num_hidden_layers", config_.n_layers);
      return layer >= config_.n_layers &&
             (cut_off || shards_.contains(fmt::format("{}{}.eh_proj.weight", kLayers, layer)));
    }
    return shards_.multimodal() && !name.starts_with("model.") && !name.starts_with("lm_head.");
  }

  // Only reached when the embedding is the head: a second copy is skipped, another matrix is not.
  void check_tied_head() {
    const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
    if (!shards_.contains(embedding)) return;
    const Tensor a = shards_.tensor(head), b = shards_.tensor(embedding);
    if (a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.equal(b)) {
      skipped_.push_back(head);
    } else {
      problems_.push_back(head + ": expected the embedding's values, since tie_word_embeddings is true, got others");
    }
  }

  void report() const {
    if (problems_.empty()) return;
    std::string text;
    for (size_t i = 0; i < std::min(problems_.size(), kMostNamedProblems); ++i) {
      text += (i > 0 ? "; " : "") + problems_[i];
    }
    if (problems_.size() > kMostNamedProblems) {
      text += fmt::format("; and {} more", problems_.size() - kMostNamedProblems);
    }
    text = printable(text);  // names of files and tensors, which may hold what would end or break the line
    if (problems_.size() == 1) throw DataError("{}: {}", directory_.string(), text);
    throw DataError("{}: {} problems: {}", directory_.string(), problems_.size(), text);
  }

  std::filesystem::path directory_;
  const ModelConfig& config_;
  const std::vector<WeightRow>& table_;
  std::vector<std::string> problems_, skipped_;
  std::vector<Source> sources_;  // in the table's order
  std::set<std::string> noted_;
  ShardSet shards_;
};

}  // namespace

std::vector<std::string> load_weights(const std::filesystem::path& directory, const ModelConfig& config,
                                      const std::vector<WeightRow>& table, at::ScalarType dtype) {
  Loader loader(directory, config, table);
  loader.check();
  loader.fill(dtype);
  return loader.skipped();
}

std::vector<std::string> check_weights(const std::filesystem::path& directory, const ModelConfig& config) {
  ModelWeights unused;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), unused);
  Loader loader(directory, config, table);
  loader.check();
  return loader.skipped();
}

std::map<std::string, at::ScalarType> stored_dtypes(const std::filesystem::path& directory, const ModelConfig& config) {
  ModelWeights unused;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), unused);
  Loader loader(directory, config, table);
  loader.check();
  return loader.stored_dtypes();
}

}  // namespace parlat
