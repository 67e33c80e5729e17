#include <algorithm>
#include <memory>

#include "cli/commands.h"
#include "cli/decode_flags.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/progress.h"
#include "parlat/base/units.h"
#include "parlat/bench/decode_bench.h"
#include "parlat/decode/cache_size.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model_config = "v2-lite", cache_dtype;
  std::vector<std::string> layouts = {"mla"};
  int64_t groups = 0, layers = 0, steps = 8, cache_budget = 0;
  std::vector<int64_t> contexts = {1024, 4096}, batches = {1};
};

DecodeBenchOptions bench_options(const Flags& flags, const std::string& layout, int ranks) {
  DecodeBenchOptions options;
  options.config = load_model_config(flags.model_config);
  if (flags.layers > 0) options.config.n_layers = flags.layers;
  options.layout = listed_layout_spec(layout, flags.groups, ranks);
  options.contexts = flags.contexts;
  options.batches = flags.batches;
  options.cache_budget = flags.cache_budget;
  options.dtype = parse_dtype("dtype", flags.common.dtype);
  options.cache_dtype = flags.cache_dtype.empty() ? options.dtype : parse_dtype("cache-dtype", flags.cache_dtype);
  options.steps = flags.steps;
  options.seed = flags.common.seed;
  return options;
}

// Before weights are made.
void check_memory(const DecodeBenchOptions& options, const RankRunner& run_ranks) {
  const MlaDims& dims = options.config.mla.dims;
  run_ranks([&](Communicator& comm) {
    const double bytes = cache_elements_per_token(dims, options.layout, comm.size()) *
                         static_cast<double>(options.config.n_layers) *
                         static_cast<double>(c10::elementSize(options.cache_dtype));
    const int64_t tokens = options.cache_budget > 0
                               ? static_cast<int64_t>(static_cast<double>(options.cache_budget) / bytes)
                               : *std::max_element(options.contexts.begin(), options.contexts.end()) *
                                     *std::max_element(options.batches.begin(), options.batches.end());
    require_weight_memory(options.config, static_cast<int64_t>(c10::elementSize(options.dtype)), comm);
    require_cache_memory(options.config, options.layout, tokens, options.cache_dtype, comm);
  });
}

std::vector<std::string> table_row(const DecodeBenchRow& row, const std::string& layout, int64_t groups, int ranks) {
  const auto timed = [&](const std::string& figure) { return row.tokens_per_s > 0 ? figure : "-"; };
  return {layout,
          fmt::format("{}", groups),
          fmt::format("{}", ranks),
          fmt::format("{}", row.batch),
          fmt::format("{}", row.context),
          timed(fmt::format("{:.2f}", row.ms.min)),
          timed(fmt::format("{:.2f}", row.ms.median)),
          timed(fmt::format("{:.2f}", row.ms.p90)),
          timed(fmt::format("{:.1f}", row.tokens_per_s)),
          fmt::format("{:.0f} B", row.cache_bytes_per_token),
          timed(fmt::format("{:.1f}", row.cache_gb_per_s)),
          timed(fmt::format("{:.1f}", row.attention_gflops)),
          timed(format_bytes(static_cast<double>(row.sent_bytes))),
          fmt::format("{:.1e}", row.max_error),
          fmt::format("{:.1e}", row.step.max_error),
          !row.ok          ? "FAILED"
          : row.batch == 0 ? "none fits"
                           : "ok"};
}

// Adds to every row its ratios to the first layout with the same ranks and context, and prints them by context.
void print_budget_table(const Flags& flags, nlohmann::json& rows) {
  std::vector<std::vector<std::string>> table = {
      {"context", "layout", "groups", "ranks", "batch", "cache a rank", "tokens/s", "tokens/s ratio", "bytes ratio"}};
  for (auto& row : rows) {
    const auto& first = *std::find_if(rows.begin(), rows.end(), [&](const nlohmann::json& other) {
      return other["ranks"] == row["ranks"] && other["context"] == row["context"];
    });
    const auto of = [](const nlohmann::json& from, const char* key) { return from[key].get<double>(); };
    const auto integer = [&](const char* key) { return fmt::format("{}", row[key].get<int64_t>()); };
    const double rate = of(row, "tokens_per_s"), first_rate = of(first, "tokens_per_s");
    const double bytes_ratio = of(first, "cache_bytes_per_token") / of(row, "cache_bytes_per_token");
    row["bytes_ratio"] = bytes_ratio;
    row["tokens_per_s_ratio"] = first_rate > 0 ? nlohmann::json(rate / first_rate) : nlohmann::json();
    table.push_back({integer("context"), row["layout"].get<std::string>(), integer("groups"), integer("ranks"),
                     integer("batch"), format_bytes(of(row, "cache_bytes")),
                     rate > 0                ? fmt::format("{:.1f}", rate)
                     : row["ok"].get<bool>() ? "none fits"
                                             : "FAILED",
                     first_rate > 0 ? fmt::format("{:.2f}", rate / first_rate) : "-",
                     fmt::format("{:.2f}", bytes_ratio)});
  }
  std::stable_sort(table.begin() + 1, table.end(),
                   [](const auto& a, const auto& b) { return std::stoll(a[0]) < std::stoll(b[0]); });
  fmt::print("\nas many sequences as fit in {} of cache a rank; ratios to {} (of bytes a token: its over theirs)\n",
             format_bytes(static_cast<double>(flags.cache_budget)), flags.layouts[0]);
  print_table(table);
}

void run(const Flags& flags) {
  const bool prints = is_printing_process(flags.common);
  std::vector<std::vector<std::string>> table = {{"layout", "groups", "ranks", "batch", "context", "ms min", "median",
                                                  "p90", "tokens/s", "cache a token", "cache GB/s", "GFLOP/s", "sent",
                                                  "attention error", "step error", ""}};
  nlohmann::json rows = nlohmann::json::array();
  bool all_ok = true;
  const std::vector<CommonOptions> rank_counts = each_rank_count(flags.common);
  Progress progress(
      "decode",
      static_cast<int64_t>(rank_counts.size() * flags.layouts.size() * flags.contexts.size() * flags.batches.size()),
      "cases", flags.common.quiet || !prints);
  int64_t done = 0;
  for (const CommonOptions& common : rank_counts) {
    const RankRunner run_ranks = [&](const auto& body) { with_ranks(common, body); };
    const int ranks = run_and_keep(run_ranks, 0, [](Communicator& comm, int& mine) { mine = comm.size(); });
    for (const std::string& layout : flags.layouts) {
      const DecodeBenchOptions options = bench_options(flags, layout, ranks);
      check_memory(options, run_ranks);
      const auto observe = [&](const std::string& what) { progress.update(done++, layout + ", " + what); };
      for (const DecodeBenchRow& row : bench_decode(options, run_ranks, observe)) {
        table.push_back(table_row(row, layout, options.layout.groups, ranks));
        rows.push_back(to_json(row, options, ranks, flags.common.threads));
        all_ok = all_ok && row.ok;
      }
    }
  }
  progress.update(done);
  if (prints) {
    const MachineLimits limits = measure_limits(flags.common.threads);
    print_table(table);
    if (flags.cache_budget > 0) print_budget_table(flags, rows);
    fmt::print("this machine, {} threads: copies {:.1f} GB/s (read and written), fp32 products {:.1f} GFLOP/s\n",
               flags.common.threads, limits.copy_gb_per_s, limits.gemm_gflops);
    write_record(flags.common, "bench decode",
                 {{"model_config", flags.model_config},
                  {"layers", flags.layers},
                  {"copy_gb_per_s", limits.copy_gb_per_s},
                  {"gemm_gflops", limits.gemm_gflops}},
                 rows);
  }
  if (!all_ok) throw CLI::RuntimeError(1);
}

}  // namespace

void add_bench_decode(CLI::App& bench) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  const auto flags = std::make_shared<Flags>();
  CLI::App* const command = bench.add_subcommand(
      "decode", "decode steps of a model with random weights over a filled cache: verified, then timed");
  add_common_options(*command, flags->common);
  flags->common.dtype = "bf16";
  command->add_option("--model-config", flags->model_config, "a config.json or a built-in name")->capture_default_str();
  command->add_option("--layers", flags->layers, "in place of the model's")->check(count);
  add_list_option(*command, "--layouts", flags->layouts, "mla, gla, tpla, dcp, tpla-dcp");
  command->add_option("--groups", flags->groups, "slices of the latent (0: one a rank; tpla-dcp: 2)");
  add_list_option(*command, "--context", flags->contexts, "tokens stored")->check(count);
  CLI::Option* const batch = add_list_option(*command, "--batch", flags->batches, "sequences")->check(count);
  add_size_option(*command, "--cache-budget", flags->cache_budget,
                  "bytes of cache a rank, as in 64MB: in place of --batch, the most sequences that fit")
      ->excludes(batch);
  command->add_option("--cache-dtype", flags->cache_dtype, "fp32 or bf16; default: --dtype");
  command->add_option("--steps", flags->steps, "timed steps")->check(count)->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
