#include <cmath>
#include <memory>

#include "cli/attention_flags.h"
#include "cli/commands.h"
#include "cli/peak_sites.h"
#include "cli/ranks.h"
#include "parlat/base/progress.h"
#include "parlat/base/units.h"
#include "parlat/bench/attention_bench.h"
#include "parlat/bench/comm_bench.h"
#include "parlat/bench/published_attention.h"

namespace parlat {

namespace {

struct LayerFlags {
  CommonOptions common;
  AttentionFlags attention;
  std::string model_config = "v2-lite";
  std::vector<std::string> forms;
  std::vector<int64_t> sequences = {2048}, heads;
  int64_t d_model = 0;
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
  int64_t batch = 1, documents = 1, verify_sequence = 0;
  std::string pass = "forward+backward", sharding = "contiguous";
  int repeats = 5;
  bool dry_run = false, as_published = false;
};

AttentionBenchOptions attention_options(const LayerFlags& flags) {
  AttentionBenchOptions options;
  load_in_every_process(flags.common,
                        [&] { options.spec = load_model_config(flags.model_config, flags.inner_norm_eps).mla; });
  if (options.heads = flags.heads; options.heads.empty()) options.heads = {options.spec.dims.n_heads};
  if (flags.d_model > 0) options.spec.dims.d_model = flags.d_model;
  options.attention = parse(flags.attention);
  options.forms = parse_forms(flags.forms, options.spec.dims.d_q_latent.has_value(), options.attention);
  options.sequences = flags.sequences;
  options.sharding = parse_sharding(flags.sharding);
  options.batch = flags.batch;
  options.documents = flags.documents;
  options.backward = flags.pass == "forward+backward";
  options.repeats = flags.repeats;
  options.verify_sequence = flags.verify_sequence;
  options.seed = flags.common.seed;
  if (flags.as_published && flags.forms.empty()) {
    options.forms = {TrainForm::kExplicit, TrainForm::kAbsorbed, TrainForm::kLaga};
  }
  options.dry_run = flags.dry_run || flags.as_published;
  options.as_published = flags.as_published;
  return options;
}

nlohmann::json attention_config(const LayerFlags& flags, const AttentionBenchOptions& options) {
  const MlaDims& d = options.spec.dims;
  nlohmann::json json = {{"model_config", flags.model_config},
                         {"ranks", flags.common.ranks},
                         {"threads", flags.common.threads},
                         {"d_model", d.d_model},
                         {"d_nope", d.d_nope},
                         {"d_rope", d.d_rope},
                         {"d_v", d.d_v},
                         {"d_latent", d.d_latent},
                         {"inner_norm_eps", options.spec.inner_norm_eps},
                         {"repeats", options.repeats},
                         {"seed", options.seed}};
  if (d.d_q_latent) json["d_q_latent"] = *d.d_q_latent;
  return json;
}

// Wrong requests are refused before anything is measured.
void check_grid(const std::vector<CommonOptions>& rank_counts, const AttentionBenchOptions& options) {
  for (const int64_t sequence : options.sequences) require_tokens(options.documents, sequence);
  if (options.as_published) {
    for (const TrainForm form : options.forms) validate_published_form(form);
  }
  for (const CommonOptions& common : rank_counts) {
    const int ranks = count_ranks(common);
    for (const TrainForm form : options.forms) {
      for (const int64_t heads : options.heads) {
        validate_form(form, ranks, heads, options.spec.dims.d_q_latent.has_value(), options.attention);
      }
    }
  }
}

using Table = std::vector<std::vector<std::string>>;

std::vector<std::string> join(std::initializer_list<std::vector<std::string>> parts) {
  std::vector<std::string> all;
  for (const std::vector<std::string>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

const std::vector<std::string> kShapeColumns = {"form", "kernel", "ranks", "heads", "S", "dtype"};
std::vector<std::string> shape_cells(const AttentionBenchRow& row, const AttentionBenchOptions& options) {
  return {std::string(name(row.form)),     std::string(name(options.attention.kernel)),
          fmt::format("{}", row.ranks),    fmt::format("{}", row.heads),
          fmt::format("{}", row.sequence), std::string(name(options.dtype))};
}

const std::vector<std::string> kTimeColumns = {"ms min", "median", "p90", "tokens/s"};
std::vector<std::string> time_cells(const AttentionBenchRow& row) {
  return {fmt::format("{:.1f}", row.ms.min), fmt::format("{:.1f}", row.ms.median), fmt::format("{:.1f}", row.ms.p90),
          format_count(std::llround(row.tokens_per_s))};
}

const std::vector<std::string> kByteColumns = {"sent fwd", "sent", "paper fwd", "peak"};
std::vector<std::string> byte_cells(const AttentionBenchRow& row) {
  return {format_bytes(static_cast<double>(row.sent_forward.total())),
          format_bytes(static_cast<double>(row.sent.total())), format_bytes(static_cast<double>(row.paper_bytes)),
          format_bytes(static_cast<double>(row.peak_activation_bytes))};
}

const std::vector<std::string> kCheckColumns = {"error", "allowed", ""};
std::vector<std::string> check_cells(const AttentionBenchRow& row) {
  return {fmt::format("{:.1e}", row.check.max_error), fmt::format("{:.1e}", row.check.tolerance),
          row.check.ok ? "ok" : "FAILED"};
}

void run_attention(const LayerFlags& flags) {
  if (flags.dry_run || flags.as_published) require_local_ranks(flags.common);
  AttentionBenchOptions options = attention_options(flags);
  const std::vector<at::ScalarType> dtypes = parse_compute_dtypes(flags.common.dtype);
  const std::vector<CommonOptions> rank_counts = each_rank_count(flags.common);
  check_grid(rank_counts, options);
  const size_t combinations = rank_counts.size() * dtypes.size() * options.heads.size() * options.sequences.size();
  const bool prints = is_printing_process(flags.common);
  Progress progress("attention", static_cast<int64_t>(combinations), "shapes", flags.common.quiet || !prints);
  int64_t done = 0;

  Table table = {options.dry_run ? join({kShapeColumns, kByteColumns})
                                 : join({kShapeColumns, kTimeColumns, kByteColumns, kCheckColumns})};
  Table sites = {join({kShapeColumns, {"at the peak", "bytes", ""}})};
  nlohmann::json rows = nlohmann::json::array();
  bool all_ok = true;
  for (const CommonOptions& common : rank_counts) {
    const RankRunner run_ranks = [&](const auto& body) { with_ranks(common, body); };
    for (const at::ScalarType dtype : dtypes) {
      options.dtype = dtype;
      const auto observe = [&](const std::string& what) {
        progress.update(done++, fmt::format("{}, {}, {}", common.ranks, name(dtype), what));
      };
      for (const AttentionBenchRow& row : bench_attention(options, run_ranks, observe)) {
        rows.push_back(to_json(row, options));
        if (options.dry_run) {
          table.push_back(join({shape_cells(row, options), byte_cells(row)}));
          for (const auto& cells : peak_cells(row.peak_sites))
            sites.push_back(join({shape_cells(row, options), cells}));
          continue;
        }
        table.push_back(join({shape_cells(row, options), time_cells(row), byte_cells(row), check_cells(row)}));
        all_ok = all_ok && row.check.ok;
      }
    }
  }
  progress.update(done);
  if (prints) {
    print_table(table);
    if (options.dry_run) {
      fmt::print("\n");
      print_table(sites);
    }
    write_record(flags.common, "bench attention", attention_config(flags, options), rows);
  }
  if (!all_ok) throw CLI::RuntimeError(1);
}

void add_attention(CLI::App& bench) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  CLI::App* const command = bench.add_subcommand(
      "attention", "one MLA block in every form: verified against the fp64 oracle, then timed side by side");
  const auto flags = std::make_shared<LayerFlags>();
  add_common_options(*command, flags->common);
  command->add_option("--model-config", flags->model_config, "whose widths: a config.json or a built-in name")
      ->capture_default_str();
  add_inner_norm_eps(*command, flags->inner_norm_eps);
  command->get_option("--dtype")->description("some of fp32,bf16,fp64");
  add_attention_options(*command, flags->attention);
  add_list_option(*command, "--forms", flags->forms, forms_help());
  add_list_option(*command, "--sequence", flags->sequences, "tokens of a sequence")->check(count);
  add_list_option(*command, "--heads", flags->heads, "head counts in place of the model's")->check(count);
  command->add_option("--d-model", flags->d_model, "in place of the model's")->check(count);
  command->add_option("--batch", flags->batch, "sequences")->check(count)->capture_default_str();
  command->add_option("--documents", flags->documents, "packed into each sequence")
      ->check(count)
      ->capture_default_str();
  command->add_option("--pass", flags->pass, "forward or forward+backward")
      ->check(CLI::IsMember({"forward", "forward+backward"}))
      ->capture_default_str();
  command->add_option("--sharding", flags->sharding, "contiguous or zigzag")->capture_default_str();
  command->add_option("--repeats", flags->repeats, "timed passes")->check(count)->capture_default_str();
  command
      ->add_option("--verify-sequence", flags->verify_sequence,
                   "tokens given to the oracle (default: a few seconds' worth)")
      ->check(count);
  command->add_flag("--dry-run", flags->dry_run,
                    "bytes sent and peak memory only: the same code on tensors without values, of any size");
  command->add_flag("--as-published", flags->as_published,
                    "explicit, absorbed and laga as the LAGA paper's prototype writes attention (a dry run)");
  command->callback([flags] { run_attention(*flags); });
}

struct CommFlags {
  CommonOptions common;
  CommBenchOptions options;
};

void run_comm(const CommFlags& flags) {
  const bool prints = is_printing_process(flags.common);
  const std::vector<CommonOptions> rank_counts = each_rank_count(flags.common);
  for (const CommonOptions& common : rank_counts) count_ranks(common);  // wrong ones are refused before any is measured
  std::vector<std::vector<std::string>> table = {
      {"collective", "backend", "ranks", "bytes", "ms min", "median", "p90", "sent", "GB/s"}};
  nlohmann::json rows = nlohmann::json::array();
  for (const CommonOptions& common : rank_counts) {
    const RankRunner run_ranks = [&](const auto& body) { with_ranks(common, body); };
    const nlohmann::json measured =
        run_and_keep(run_ranks, nlohmann::json(),
                     [&](Communicator& comm, nlohmann::json& mine) { mine = bench_comm(comm, flags.options); });
    for (const nlohmann::json& row : measured) {
      const nlohmann::json& ms = row.at("ms");
      table.push_back({row.at("collective"), row.at("backend"), row.at("ranks").dump(),
                       format_count(row.at("bytes").get<int64_t>()), fmt::format("{:.3f}", ms.at("min").get<double>()),
                       fmt::format("{:.3f}", ms.at("median").get<double>()),
                       fmt::format("{:.3f}", ms.at("p90").get<double>()),
                       format_bytes(row.at("sent_bytes").get<double>()),
                       fmt::format("{:.3f}", row.at("gbytes_per_s").get<double>())});
      rows.push_back(row);
    }
  }
  if (!prints) return;
  print_table(table);
  write_record(flags.common, "bench comm", {{"ranks", flags.common.ranks}, {"repeats", flags.options.repeats}}, rows);
}

void add_comm(CLI::App& bench) {
  CLI::App* const command = bench.add_subcommand("comm", "latency and bandwidth of every collective, checked exactly");
  const auto flags = std::make_shared<CommFlags>();
  add_common_options(*command, flags->common);
  add_list_option(*command, "--bytes", flags->options.bytes, "of the fp32 tensor a rank brings");
  command->add_option("--repeats", flags->options.repeats, "timed samples")->capture_default_str();
  command->callback([flags] { run_comm(*flags); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* const bench = app.add_subcommand("bench", "measure: verified first, then timed");
  bench->require_subcommand(1);
  add_attention(*bench);
  add_comm(*bench);
  add_bench_decode(*bench);
  add_bench_kernel(*bench);
  add_bench_nondeterminism(*bench);
}

}  // namespace parlat
