#include <cmath>
#include <memory>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "parlat/base/progress.h"
#include "parlat/bench/kernel_bench.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model_config = "v2-lite";
  std::vector<int64_t> sequences = {1024, 2048, 4096}, heads;
  std::vector<std::string> passes = {"forward", "forward+backward"}, kernels = kernel_names();
  int repeats = 5;
};

std::vector<std::string> table_row(const KernelBenchRow& row, const KernelBenchOptions& options) {
  const double seconds = row.ms.median / 1e3;
  return {row.kernel,
          fmt::format("{}", options.dims.n_heads),
          fmt::format("{}", options.sequence),
          std::string(name(options.dtype)),
          options.backward ? "forward+backward" : "forward",
          fmt::format("{:.1f}", row.ms.min),
          fmt::format("{:.1f}", row.ms.median),
          fmt::format("{:.1f}", row.ms.p90),
          fmt::format("{:.1f}", row.attention_flops / seconds / 1e9),
          fmt::format("{:.1f}", (row.attention_flops + row.up_projection_flops) / seconds / 1e9),
          fmt::format("{:.1f}", row.gemm_flops_per_s / 1e9),
          fmt::format("{:.0f} %", 100 * row.of_gemm_rate()),
          fmt::format("{:.1e}", row.max_error),
          fmt::format("{:.1e}", row.tolerance),
          row.ok ? "ok" : "FAILED"};
}

// What cannot be is refused before anything is measured.
std::vector<KernelBenchOptions> all_cases(const Flags& flags) {
  count_ranks(flags.common);
  const MlaDims dims = load_model_config(flags.model_config).mla.dims;
  std::vector<KernelBenchOptions> cases;
  for (const at::ScalarType dtype : parse_compute_dtypes(flags.common.dtype)) {
    for (const int64_t n_heads : flags.heads.empty() ? std::vector{dims.n_heads} : flags.heads) {
      for (const int64_t sequence : flags.sequences) {
        for (const std::string& pass : flags.passes) {
          cases.push_back({.dims = dims,
                           .sequence = sequence,
                           .dtype = dtype,
                           .backward = pass == "forward+backward",
                           .repeats = flags.repeats,
                           .seed = flags.common.seed,
                           .kernels = flags.kernels});
          cases.back().dims.n_heads = n_heads;
          require_memory(cases.back());
        }
      }
    }
  }
  return cases;
}

void run(const Flags& flags) {
  const std::vector<KernelBenchOptions> cases = all_cases(flags);
  Progress progress("kernel", static_cast<int64_t>(cases.size()), "shapes", flags.common.quiet);
  std::vector<std::vector<std::string>> table = {{"kernel", "heads", "S", "dtype", "pass", "ms min", "median", "p90",
                                                  "attention GFLOP/s", "with up-projection", "product's rate",
                                                  "reached", "error", "allowed", ""}};
  nlohmann::json rows = nlohmann::json::array();
  bool all_ok = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    const KernelBenchOptions& options = cases[i];
    progress.update(static_cast<int64_t>(i),
                    fmt::format("{}, {} heads, {} tokens, {}", name(options.dtype), options.dims.n_heads,
                                options.sequence, options.backward ? "forward+backward" : "forward"));
    std::vector<KernelBenchRow> measured;
    with_ranks(flags.common, [&](Communicator&) { measured = bench_kernels(options); });
    for (const KernelBenchRow& row : measured) {
      table.push_back(table_row(row, options));
      rows.push_back(to_json(row, options));
      all_ok = all_ok && row.ok;
    }
  }
  progress.update(static_cast<int64_t>(cases.size()));
  print_table(table);
  write_record(flags.common, "bench kernel",
               {{"model_config", flags.model_config},
                {"threads", flags.common.threads},
                {"repeats", flags.repeats},
                {"seed", flags.common.seed}},
               rows);
  if (!all_ok) throw CLI::RuntimeError(1);
}

}  // namespace

void add_bench_kernel(CLI::App& bench) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  CLI::App* const command = bench.add_subcommand(
      "kernel",
      "attention of one rank, causal: ours and torch's, verified, timed in turns, beside this machine's products");
  const auto flags = std::make_shared<Flags>();
  add_common_options(*command, flags->common);
  command->remove_option(command->get_option("--ranks"));
  command->get_option("--dtype")->description("some of fp32,bf16,fp64");
  command->add_option("--model-config", flags->model_config, "whose widths: a config.json or a built-in name")
      ->capture_default_str();
  add_list_option(*command, "--heads", flags->heads, "head counts in place of the model's")->check(count);
  add_list_option(*command, "--sequence", flags->sequences, "tokens")->check(count);
  add_list_option(*command, "--pass", flags->passes, "some of forward,forward+backward")
      ->check(CLI::IsMember({"forward", "forward+backward"}));
  add_list_option(*command, "--kernels", flags->kernels, "some of " + fmt::format("{}", fmt::join(kernel_names(), ",")))
      ->check(CLI::IsMember(kernel_names()));
  command->add_option("--repeats", flags->repeats, "timed passes")->check(count)->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
