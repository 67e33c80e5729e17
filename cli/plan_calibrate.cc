#include <sched.h>

#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "cli/record.h"
#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/bench/calibrate.h"
#include "parlat/io/files.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model_config = "v3";
  std::filesystem::path out;
  int nodes = 1;
  bool quick = false;
};

int64_t cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void run(const Flags& flags) {
  if (flags.common.ranks != "mpi" || launched_rank() == 0) require_writable(flags.out);
  CalibrateOptions options;
  options.dims = load_model_config(flags.model_config).mla.dims;
  options.dtypes = parse_compute_dtypes(flags.common.dtype);
  options.nodes = flags.nodes;
  options.ranks_at_full_rate = std::max<int64_t>(1, cores() / flags.common.threads);
  options.node_memory_bytes = static_cast<double>(memory_limit());
  options.quick = flags.quick;
  const RankRunner run_ranks = [&](const auto& body) { with_ranks(flags.common, body); };
  const Machine machine = calibrate(options, run_ranks);
  if (!is_printing_process(flags.common)) return;
  const nlohmann::json here = machine_json();
  const std::string text =
      fmt::format("# {}, {} cores, {}; measured with --ranks {} --threads {}{}\n{}", here["cpu"].get<std::string>(),
                  here["cores"].dump(), here["isa"].get<std::string>(), flags.common.ranks, flags.common.threads,
                  flags.quick ? " --quick" : "", to_toml(machine));
  write_file_atomically(flags.out, text);
  fmt::print("{}", text);
  flush_stdout();
}

}  // namespace

void add_plan_calibrate(CLI::App& plan) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* const command =
      plan.add_subcommand("calibrate", "measures this machine, in seconds, and describes it for the other plans");
  add_common_options(*command, flags->common);
  flags->common.ranks = fmt::format("local:{}", std::max<int64_t>(1, cores()));
  flags->common.dtype = "fp32,bf16";
  command->remove_option(command->get_option("--json"));
  command->get_option("--dtype")->description("some of fp32,bf16,fp64");
  command->add_option("--out", flags->out, "the description, TOML")->required();
  command->add_option("--model-config", flags->model_config, "whose widths kernels are measured with")
      ->capture_default_str();
  command->add_option("--nodes", flags->nodes, "that mpi's ranks are spread over evenly, consecutive ones together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--quick", flags->quick, "fewer repeats");
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
