#include <memory>
#include <set>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/progress.h"
#include "parlat/bench/nondeterminism_bench.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model_config = "tiny";
  NondeterminismOptions options;
  bool quick = false;
};

std::string apart_text(double value) { return value == 0 ? "0" : fmt::format("{:.1e}", value); }

std::string ratio_text(double over, double under) { return under > 0 ? fmt::format("{:.1f}", over / under) : "-"; }

const TwinRun& drawn(const NondeterminismResult& result, const std::string& model) {
  for (const TwinRun& run : result.runs) {
    if (run.shuffled && run.model == model) return run;
  }
  throw InternalError("no run of " + model);
}

// 1, 2, 4, ..., the last, and those around the first flip.
std::set<int64_t> shown_steps(const TwinRun& experts) {
  const auto last = static_cast<int64_t>(experts.steps.size());
  std::set<int64_t> steps = {last};
  for (int64_t step = 1; step < last; step *= 2) steps.insert(step);
  if (!experts.first_flip) return steps;
  for (int64_t step = experts.first_flip->step - 2; step <= experts.first_flip->step + 1; ++step) {
    if (step >= 1 && step <= last) steps.insert(step);
  }
  return steps;
}

void print_curves(const NondeterminismResult& result) {
  const TwinRun &dense = drawn(result, "dense"), &experts = drawn(result, "experts");
  std::vector<std::vector<std::string>> table = {
      {"step", "dense: loss", "apart", "output", "weights", "experts: loss", "apart", "output", "weights", "flips"}};
  for (const int64_t step : shown_steps(experts)) {
    std::vector<std::string> row = {fmt::format("{}", step)};
    for (const TwinRun* run : {&dense, &experts}) {
      const Apart& apart = run->steps[step - 1];
      for (std::string& cell :
           std::vector<std::string>{fmt::format("{:.4f}", apart.loss), apart_text(apart.loss_difference),
                                    apart_text(apart.output), apart_text(apart.weights)}) {
        row.push_back(std::move(cell));
      }
    }
    row.push_back(fmt::format("{}", experts.steps[step - 1].flips));
    table.push_back(std::move(row));
  }
  print_table(std::move(table));
}

void print_summary(const NondeterminismResult& result) {
  std::vector<std::vector<std::string>> table = {{"twins", "sums", "loss", "apart", "output", "weights", "flips",
                                                  "first at step", "layer", "token", "jump of the loss",
                                                  "of the output"}};
  for (const TwinRun& run : result.runs) {
    const Apart last = run.last();
    const auto& flip = run.first_flip;
    table.push_back({run.model, run.shuffled ? "drawn orders" : "deterministic", fmt::format("{:.4f}", last.loss),
                     apart_text(last.loss_difference), apart_text(last.output), apart_text(last.weights),
                     fmt::format("{}", last.flips), flip ? fmt::format("{}", flip->step) : "-",
                     flip ? fmt::format("{}", flip->layer) : "-",
                     flip ? fmt::format("{} of sequence {}", flip->position, flip->sequence) : "-",
                     run.jump ? fmt::format("{:.1f} x", run.jump->loss) : "-",
                     run.jump ? fmt::format("{:.1f} x", run.jump->output) : "-"});
  }
  fmt::print("\n");
  print_table(std::move(table));
  const Apart dense = drawn(result, "dense").last(), experts = drawn(result, "experts").last();
  fmt::print("experts over dense, last tenth of the steps: loss {}, output {}, weights {}\n",
             ratio_text(experts.loss_difference, dense.loss_difference), ratio_text(experts.output, dense.output),
             ratio_text(experts.weights, dense.weights));
}

nlohmann::json config_json(const Flags& flags, const NondeterminismOptions& options,
                           const NondeterminismResult& result) {
  return {{"model_config", flags.model_config},
          {"batch", options.batch},
          {"sequence", options.sequence},
          {"steps", options.steps},
          {"learning_rate", options.learning_rate},
          {"dtype", name(options.dtype)},
          {"seed", options.seed},
          {"max_error", result.max_error},
          {"tolerance", result.tolerance},
          {"ok", result.ok}};
}

void run(const Flags& flags) {
  NondeterminismOptions options = flags.options;
  options.experts = load_model_config(flags.model_config);
  options.dtype = parse_compute_dtype(flags.common.dtype);
  options.seed = flags.common.seed;
  if (flags.quick) {
    options.batch = 2;
    options.sequence = 32;
    options.steps = 8;
  }
  CommonOptions twins = flags.common;
  twins.ranks = "local:2";
  Progress progress("nondeterminism", 4 * options.steps, "steps", flags.common.quiet);
  int64_t done = 0;
  const NondeterminismResult result = bench_nondeterminism(
      options, [&](const auto& body) { with_ranks(twins, body); },
      [&](const std::string& what) { progress.update(++done, what); });
  print_curves(result);
  print_summary(result);
  fmt::print("a product in a drawn order: error {:.1e}, allowed {:.1e}, {}\n", result.max_error, result.tolerance,
             result.ok ? "ok" : "FAILED");
  write_record(flags.common, "bench nondeterminism", config_json(flags, options, result), to_json(result));
  if (!result.ok) throw CLI::RuntimeError(1);
}

}  // namespace

void add_bench_nondeterminism(CLI::App& bench) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  CLI::App* const command = bench.add_subcommand(
      "nondeterminism",
      "twins of one seed whose products are summed in orders of their own: how far a dense model and one with experts "
      "part, and the first routing flip");
  const auto flags = std::make_shared<Flags>();
  add_common_options(*command, flags->common);
  command->remove_option(command->get_option("--ranks"));
  command->remove_option(command->get_option("--threads"));
  command->get_option("--dtype")->description("fp32 or fp64");
  NondeterminismOptions& options = flags->options;
  command->add_option("--model-config", flags->model_config, "with experts: a config.json or a built-in name")
      ->capture_default_str();
  command->add_option("--batch", options.batch, "sequences")->check(count)->capture_default_str();
  command->add_option("--sequence", options.sequence, "tokens of a sequence")->check(count)->capture_default_str();
  command->add_option("--steps", options.steps, "of every run")->check(count)->capture_default_str();
  command->add_option("--lr", options.learning_rate, "of AdamW")->check(CLI::PositiveNumber)->capture_default_str();
  command->add_flag("--quick", flags->quick, "a few steps on few tokens: that it works, in seconds");
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
