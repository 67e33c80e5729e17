#include <c10/util/accumulate.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/inspect_cache.h"
#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/base/units.h"
#include "parlat/plan/flops.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model;
  std::string model_config = "tiny";
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
  int64_t expert_parallel = 1;
};

// All tensors whose names differ only in the layer and the expert.
struct TensorKind {
  std::string name;
  std::vector<int64_t> shape;
  int64_t count = 0, parameters = 0, bytes = 0;
};

std::string without_numbers(const std::string& name) {
  std::string pattern;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool number = name[i] >= '0' && name[i] <= '9' && (!pattern.empty() && (pattern.back() == '.'));
    if (!number) {
      pattern += name[i];
      continue;
    }
    while (i + 1 < name.size() && name[i + 1] >= '0' && name[i + 1] <= '9') ++i;
    pattern += '*';
  }
  return pattern;
}

std::vector<TensorKind> tensor_kinds(const ModelConfig& config, Range experts, at::ScalarType dtype) {
  ModelWeights weights;
  std::vector<TensorKind> kinds;
  for (const WeightRow& row : weight_table(config, experts, weights)) {
    const std::string name = without_numbers(row.name);
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const TensorKind& k) { return k.name == name; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {.name = name, .shape = row.shape});
    const int64_t parameters = c10::multiply_integers(row.shape);
    kind->count += 1;
    kind->parameters += parameters;
    kind->bytes += parameters * static_cast<int64_t>(c10::elementSize(row.keep_fp32 ? at::kFloat : dtype));
  }
  return kinds;
}

int64_t sum_of(const std::vector<TensorKind>& kinds, int64_t TensorKind::*field) {
  int64_t sum = 0;
  for (const TensorKind& kind : kinds) sum += kind.*field;
  return sum;
}

// What config.json came to, under its own names, in the order a person reads it.
nlohmann::ordered_json resolved_config(const ModelConfig& c) {
  const MlaDims& d = c.mla.dims;
  const RopeSpec& rope = c.mla.rope;
  const bool yarn = rope.type == RopeSpec::Type::kYarn;
  nlohmann::ordered_json out = {{"model_type", c.model_type},
                                {"num_hidden_layers", c.n_layers},
                                {"vocab_size", c.vocab_size},
                                {"tie_word_embeddings", c.tied_embeddings},
                                {"hidden_size", d.d_model},
                                {"intermediate_size", c.d_mlp},
                                {"num_attention_heads", d.n_heads},
                                {"qk_nope_head_dim", d.d_nope},
                                {"qk_rope_head_dim", d.d_rope},
                                {"v_head_dim", d.d_v},
                                {"kv_lora_rank", d.d_latent},
                                {"q_lora_rank", d.d_q_latent ? nlohmann::json(*d.d_q_latent) : nlohmann::json()},
                                {"max_position_embeddings", c.max_positions},
                                {"rms_norm_eps", c.rms_norm_eps},
                                {"inner_norm_eps", c.mla.inner_norm_eps},
                                {"rope_type", yarn ? "yarn" : "default"},
                                {"rope_theta", rope.theta},
                                {"rope_interleave", rope.interleaved}};
  if (yarn) {
    out["factor"] = rope.factor;
    out["original_max_position_embeddings"] = rope.original_max_positions;
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
  }
  if (!c.moe) return out;
  const nlohmann::json hf = to_hf_json(c);
  for (const char* key : {"n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
                          "first_k_dense_replace", "moe_layer_freq", "topk_method", "scoring_func", "n_group",
                          "topk_group", "norm_topk_prob", "routed_scaling_factor"}) {
    out[key] = hf.at(key);
  }
  return out;
}

nlohmann::ordered_json scales(const MlaSpec& spec) {
  return {{"softmax_scale", spec.softmax_scale()},
          {"softmax_scale_factor", softmax_scale_factor(spec.rope)},
          {"rope_amplitude", rope_amplitude(spec.rope)}};
}

std::string value_text(const nlohmann::ordered_json& value) {
  if (value.is_number_integer()) return format_count(value.get<int64_t>());
  if (value.is_number()) return fmt::format("{:.6g}", value.get<double>());
  if (value.is_null()) return "none";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string list_text(const std::vector<std::string>& names) {
  constexpr size_t kMostNamed = 10;
  if (names.empty()) return "none";
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMostNamed); ++i) text += (i > 0 ? ", " : "") + printable(names[i]);
  if (names.size() > kMostNamed) text += fmt::format(" and {} more", names.size() - kMostNamed);
  return text;
}

void print_values(const std::string& title, const nlohmann::ordered_json& values) {
  std::vector<std::vector<std::string>> table = {{title, ""}};
  for (const auto& [key, value] : values.items()) table.push_back({key, value_text(value)});
  print_table(table);
}

void print_config(const ModelConfig& config) {
  print_values(config.name, resolved_config(config));
  fmt::print("\n");
  print_values("scales", scales(config.mla));
  fmt::print("\nignored keys: {}\n\n", list_text(config.ignored_keys));
  flush_stdout();
}

void print_kinds(const std::vector<TensorKind>& kinds, const std::string& dtype) {
  std::vector<std::vector<std::string>> table = {{"tensor", "shape", "tensors", "parameters", dtype}};
  for (const TensorKind& kind : kinds) {
    table.push_back({kind.name, shape_text(kind.shape), format_count(kind.count), format_count(kind.parameters),
                     format_bytes(static_cast<double>(kind.bytes))});
  }
  table.push_back({"all", "", format_count(sum_of(kinds, &TensorKind::count)),
                   format_count(sum_of(kinds, &TensorKind::parameters)),
                   format_bytes(static_cast<double>(sum_of(kinds, &TensorKind::bytes)))});
  print_table(table);
}

bool holds_weights(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::exists(folder / "model.safetensors", ignored) ||
         std::filesystem::exists(folder / "model.safetensors.index.json", ignored);
}

struct Report {
  std::string source, dtype;
  ModelConfig config;
  std::vector<TensorKind> kinds;
  ParameterCount parameters;
  int64_t expert_parallel = 1, rank_bytes = 0;
  PredictedCache cache;
  std::vector<std::string> skipped;
};

Report make_report(const Flags& flags) {
  Report report;
  report.source = flags.model.empty() ? flags.model_config : flags.model;
  report.dtype = flags.common.dtype;
  report.config = load_model_config(report.source, flags.inner_norm_eps);
  report.expert_parallel = flags.expert_parallel;
  const at::ScalarType dtype = parse_dtype(report.dtype);
  const Range experts = all_experts(report.config);
  const int64_t most = std::max<int64_t>(experts.size(), 1);
  if (flags.expert_parallel > most) {
    throw ConfigError("expert-parallel: expected at most {}, one routed expert a rank, got {}", most,
                      flags.expert_parallel);
  }
  report.kinds = tensor_kinds(report.config, experts, dtype);
  report.parameters = count_parameters(report.config);
  // Rank 0 has the largest share.
  const Range share = even_share(experts.size(), flags.expert_parallel, 0);
  report.rank_bytes = sum_of(tensor_kinds(report.config, share, dtype), &TensorKind::bytes);
  report.cache = predict_cache(report.config);
  return report;
}

void print_report(const Report& report) {
  print_config(report.config);
  print_kinds(report.kinds, report.dtype);
  fmt::print("\nparameters: {} trained, of which a token visits {}\n", format_count(report.parameters.total),
             format_count(report.parameters.active));
  fmt::print("weights of one rank: {} in {}, experts split over {}\n",
             format_bytes(static_cast<double>(report.rank_bytes)), report.dtype, report.expert_parallel);
  fmt::print("\n");
  print_table(report.cache.table);
  fmt::print("elements a layer: bytes of {} layers in bf16; slices of equal width\n\n", report.config.n_layers);
  flush_stdout();
}

void write_json(const CommonOptions& common, const Report& report) {
  nlohmann::json rows = nlohmann::json::array();
  for (const TensorKind& kind : report.kinds) {
    rows.push_back({{"tensor", kind.name},
                    {"shape", kind.shape},
                    {"tensors", kind.count},
                    {"parameters", kind.parameters},
                    {"bytes", kind.bytes}});
  }
  const nlohmann::json config = {
      {"model", report.source},
      {"dtype", report.dtype},
      {"resolved", resolved_config(report.config)},
      {"scales", scales(report.config.mla)},
      {"ignored_keys", report.config.ignored_keys},
      {"skipped_tensors", report.skipped},
      {"parameters", {{"total", report.parameters.total}, {"active", report.parameters.active}}},
      {"expert_parallel", report.expert_parallel},
      {"weight_bytes_per_rank", report.rank_bytes},
      {"predicted_cache", report.cache.rows}};
  write_record(common, "inspect", config, rows);
}

void run(const Flags& flags) {
  require_record_file(flags.common.json);
  Report report = make_report(flags);
  print_report(report);
  // What is wrong with the files comes last, as the error, after all that helps to understand it.
  if (!flags.model.empty() && holds_weights(flags.model)) {
    report.skipped = check_weights(flags.model, report.config);
    fmt::print("weight files: every tensor present and of its shape; skipped: {}\n", list_text(report.skipped));
  } else if (!flags.model.empty()) {
    fmt::print("weight files: none in {}\n", printable(flags.model));
  }
  write_json(flags.common, report);
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "inspect", "what a model resolves to: configuration, scales, tensors, memory; checks its weight files");
  const auto flags = std::make_shared<Flags>();
  add_common_options(*command, flags->common);
  CLI::Option* const model = command->add_option("--model", flags->model, "a checkpoint directory");
  command->add_option("--model-config", flags->model_config, "a config.json or a built-in name")
      ->excludes(model)
      ->capture_default_str();
  add_inner_norm_eps(*command, flags->inner_norm_eps);
  command->add_option("--expert-parallel", flags->expert_parallel, "ranks that split the experts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
