#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "cli/attention_flags.h"
#include "cli/commands.h"
#include "cli/ranks.h"
#include "cli/verify_layouts.h"
#include "parlat/base/error.h"
#include "parlat/base/progress.h"
#include "parlat/bench/form_check.h"
#include "parlat/bench/rank_runner.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  AttentionFlags attention;
  std::filesystem::path model;
  std::string model_config = "v2-lite";
  std::vector<std::string> forms;
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
  int64_t layer = 0, sequence = 67, batch = 2, documents = 3;
  bool quick = false;
};

struct Row {
  TrainForm form;
  Sharding sharding;
  int ranks;
  FormCheck check;
};

// The same layer made small: what --quick verifies in a second or two.
MlaSpec reduced(MlaSpec spec) {
  MlaDims& d = spec.dims;
  d.d_model = std::min<int64_t>(d.d_model, 128);
  d.n_heads = std::min<int64_t>(d.n_heads, 8);
  d.d_nope = std::min<int64_t>(d.d_nope, 16);
  d.d_rope = std::min<int64_t>(d.d_rope, 8);
  d.d_v = std::min<int64_t>(d.d_v, 16);
  d.d_latent = std::min<int64_t>(d.d_latent, 64);
  if (d.d_q_latent) d.d_q_latent = std::min<int64_t>(*d.d_q_latent, 96);
  return spec;
}

MlaWeights load_layer(const Flags& flags, at::ScalarType dtype) {
  const ModelConfig config = load_model_config(flags.model, flags.inner_norm_eps);
  if (flags.layer < 0 || flags.layer >= config.n_layers) {
    throw ConfigError("layer: expected one of the {} layers of {}, got {}", config.n_layers, config.name, flags.layer);
  }
  ModelWeights weights;
  std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  const std::string prefix = fmt::format("model.layers.{}.self_attn.", flags.layer);
  std::erase_if(table, [&](const WeightRow& row) { return !row.name.starts_with(prefix); });
  load_weights(flags.model, config, table, dtype);
  return weights.layers[flags.layer].mla;
}

MlaWeights make_weights(const Flags& flags) {
  const at::ScalarType dtype = parse_compute_dtype(flags.common.dtype);
  if (!flags.model.empty()) return load_layer(flags, dtype);
  const MlaSpec spec = load_model_config(flags.model_config, flags.inner_norm_eps).mla;
  return random_mla_weights(flags.quick ? reduced(spec) : spec, flags.common.seed, dtype);
}

std::vector<Row> verify_ranks(const RankRunner& run_ranks, const std::vector<TrainForm>& forms,
                              const AttentionOptions& options, const LayerCase& layer, const OracleResult& want) {
  std::vector<Row> rows;
  for (const TrainForm form : forms)
    rows.push_back({.form = form, .sharding = layer.sharding, .ranks = 0, .check = {}});
  return run_and_keep(run_ranks, rows, [&](Communicator& comm, std::vector<Row>& mine) {
    for (Row& row : mine) {
      row.ranks = comm.size();
      row.check = check_form(row.form, options, layer, want, comm);
    }
  });
}

std::vector<Row> verify_all(const Flags& flags, const LayerCase& layer, bool prints) {
  const MlaDims& dims = layer.weights.dims();
  const AttentionOptions options = parse(flags.attention);
  const std::vector<TrainForm> forms = parse_forms(flags.forms, dims.d_q_latent.has_value(), options);
  const std::vector<CommonOptions> rank_counts = each_rank_count(flags.common);
  for (const CommonOptions& common : rank_counts) {
    const int ranks = count_ranks(common);
    for (const TrainForm form : forms) {
      validate_form(form, ranks, dims.n_heads, dims.d_q_latent.has_value(), options);
    }
  }
  const OracleResult want = oracle_of(layer);

  Progress progress("verify", static_cast<int64_t>(2 * rank_counts.size()), "groups", flags.common.quiet || !prints);
  int64_t done = 0;
  std::vector<Row> rows;
  for (const CommonOptions& common : rank_counts) {
    for (const Sharding sharding : {Sharding::kContiguous, Sharding::kZigzag}) {
      progress.update(done++, fmt::format("{}, {}", common.ranks, name(sharding)));
      LayerCase sharded = layer;
      sharded.sharding = sharding;
      const RankRunner run_ranks = [&](const auto& body) { with_ranks(common, body); };
      const std::vector<Row> group = verify_ranks(run_ranks, forms, options, sharded, want);
      rows.insert(rows.end(), group.begin(), group.end());
    }
  }
  progress.update(done);
  return rows;
}

nlohmann::json to_json(const Row& row, const Flags& flags, int64_t heads) {
  nlohmann::json json = {{"form", name(row.form)},
                         {"kernel", flags.attention.kernel},
                         {"ranks", row.ranks},
                         {"sharding", name(row.sharding)},
                         {"sequence", flags.sequence},
                         {"batch", flags.batch},
                         {"documents", flags.documents},
                         {"heads", heads},
                         {"dtype", flags.common.dtype},
                         {"max_error", row.check.max_error},
                         {"tolerance", row.check.tolerance},
                         {"worst_tensor", row.check.worst},
                         {"ok", row.check.ok}};
  if (passes_latents(row.form)) json["groups"] = ring_groups(row.form, row.ranks, heads, parse(flags.attention));
  return json;
}

void run(Flags& flags, bool ranks_given) {
  require_tokens(flags.documents, flags.sequence);
  MlaWeights weights;
  load_in_every_process(flags.common, [&] { weights = make_weights(flags); });
  const LayerCase layer = make_layer_case(
      std::move(weights),
      {.batch = flags.batch, .sequence = flags.sequence, .documents = flags.documents, .seed = flags.common.seed});
  const int64_t heads = layer.weights.dims().n_heads;
  if (!ranks_given) {
    flags.common.ranks = "local:1";
    for (const int ranks : {2, 3, 4, 7, 8}) {
      if (ranks <= heads) flags.common.ranks += fmt::format(",{}", ranks);
    }
  }
  const bool prints = is_printing_process(flags.common);
  const std::vector<Row> rows = verify_all(flags, layer, prints);
  bool all_ok = std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.check.ok; });
  std::optional<VerifiedLayouts> layouts;
  if (!flags.model.empty() && flags.common.dtype != "fp64") {
    layouts = verify_layouts(flags.common, flags.model, flags.inner_norm_eps);
    all_ok = all_ok && layouts->ok;
  }
  if (prints) {
    std::vector<std::vector<std::string>> table = {{"form", "ranks", "sharding", "worst", "error", "allowed", ""}};
    nlohmann::json json = nlohmann::json::array();
    for (const Row& row : rows) {
      table.push_back({std::string(name(row.form)), fmt::format("{}", row.ranks), std::string(name(row.sharding)),
                       row.check.worst, fmt::format("{:.1e}", row.check.max_error),
                       fmt::format("{:.1e}", row.check.tolerance), row.check.ok ? "ok" : "FAILED"});
      json.push_back(to_json(row, flags, heads));
    }
    print_table(table);
    if (layouts) {
      fmt::print("\n");
      print_table(layouts->table);
      json.insert(json.end(), layouts->rows.begin(), layouts->rows.end());
    } else if (!flags.model.empty()) {
      fmt::print("\nlayouts: left out, since decoding has no fp64\n");
    }
    const nlohmann::json config = {{"model", flags.model.empty() ? flags.model_config : flags.model.string()},
                                   {"layer", flags.layer},
                                   {"inner_norm_eps", flags.inner_norm_eps},
                                   {"quick", flags.quick},
                                   {"seed", flags.common.seed}};
    write_record(flags.common, "verify", config, json);
  }
  if (!all_ok) throw CLI::RuntimeError(1);
}

}  // namespace

void add_verify(CLI::App& app) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  CLI::App* const command = app.add_subcommand("verify",
                                               "every form against the fp64 oracle: output and all gradients of one "
                                               "layer on packed documents; with --model also "
                                               "every decode layout on its first two layers");
  const auto flags = std::make_shared<Flags>();
  add_common_options(*command, flags->common);
  command->get_option("--dtype")->description("fp32, bf16 or fp64 (of forms alone: decoding has none)");
  CLI::Option* const model =
      command->add_option("--model", flags->model, "a checkpoint directory, whose weights are used");
  command->add_option("--model-config", flags->model_config, "a config.json or built-in name; random weights")
      ->excludes(model)
      ->capture_default_str();
  command->add_option("--layer", flags->layer, "of --model")->needs(model)->capture_default_str();
  add_inner_norm_eps(*command, flags->inner_norm_eps);
  command->add_flag("--quick", flags->quick, "the layer of --model-config made small")->excludes(model);
  add_attention_options(*command, flags->attention);
  add_list_option(*command, "--forms", flags->forms, forms_help());
  command->add_option("--sequence", flags->sequence, "tokens")->check(count)->capture_default_str();
  command->add_option("--batch", flags->batch, "sequences")->check(count)->capture_default_str();
  command->add_option("--documents", flags->documents, "packed into each sequence")
      ->check(count)
      ->capture_default_str();
  const CLI::Option* const ranks = command->get_option("--ranks");
  command->callback([flags, ranks] { run(*flags, ranks->count() > 0); });
}

}  // namespace parlat
