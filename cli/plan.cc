#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "cli/attention_flags.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/plan_flags.h"
#include "parlat/base/units.h"
#include "parlat/plan/crossover.h"

namespace parlat {

namespace {

struct TrainFlags {
  CommonOptions common;
  AttentionFlags attention;
  std::string model_config = "v3", machine, sharding = "zigzag", pass = "forward+backward";
  std::vector<int64_t> sequences = {4096, 16384, 131072};
  int64_t heads = 0, layers = 0, memory = 0;
  TrainPlanOptions options;
};

TrainPlanOptions train_options(const TrainFlags& flags) {
  TrainPlanOptions options = flags.options;
  const ModelConfig config = load_model_config(flags.model_config);
  options.dims = config.mla.dims;
  if (flags.heads > 0) options.dims.n_heads = flags.heads;
  options.layers = flags.layers > 0 ? flags.layers : config.n_layers;
  options.attention = parse(flags.attention);
  options.sharding = parse_sharding(flags.sharding);
  options.backward = flags.pass == "forward+backward";
  options.memory_bytes = static_cast<double>(flags.memory);
  return options;
}

// Of both passes.
SentBytes sent(const FormCosts& costs) {
  const SentBytes &f = costs.forward, &b = costs.backward;
  return {.all_to_all = f.all_to_all + b.all_to_all,
          .all_gather = f.all_gather + b.all_gather,
          .reduce_scatter = f.reduce_scatter + b.reduce_scatter,
          .all_reduce = f.all_reduce + b.all_reduce,
          .send_recv = f.send_recv + b.send_recv};
}

std::string ms(double seconds) { return fmt::format("{:.4g}", seconds * 1e3); }
std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

std::vector<std::string> table_row(const FormPlan& plan, bool use) {
  const std::string verdict = use ? "use this" : plan.misfit.empty() ? "fits" : plan.misfit;
  if (!plan.runs) return {plan.label, "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", verdict};
  return {plan.label,
          bytes(sent(plan.costs).total()),
          bytes(plan.between_bytes),
          bytes(plan.costs.paper_bytes),
          bytes(plan.costs.saved_bytes),
          bytes(plan.peak_bytes),
          fmt::format("{:.4g}", (plan.forward_flops + plan.backward_flops) / 1e12),
          fmt::format("{}", plan.steps),
          ms(plan.compute_s),
          ms(plan.exchange_s),
          ms(plan.hidden_s),
          ms(plan.total_s()),
          verdict};
}

nlohmann::json to_json(const FormPlan& plan, const TrainPlanOptions& options, bool use) {
  nlohmann::json row = {{"form", name(plan.form)},
                        {"split", plan.label},
                        {"ranks", options.ranks},
                        {"nodes", options.nodes},
                        {"heads", options.dims.n_heads},
                        {"sequence", options.sequence},
                        {"batch", options.batch},
                        {"dtype", options.dtype},
                        {"kernel", name(plan.attention.kernel)},
                        {"pass", options.backward ? "forward+backward" : "forward"},
                        {"predicted", true},
                        {"runs", plan.runs},
                        {"fits", plan.misfit.empty()},
                        {"misfit", plan.misfit},
                        {"use", use}};
  if (!plan.runs) return row;
  const auto in_ms = [](double seconds) { return seconds * 1e3; };
  row["sent_bytes"] = to_json(sent(plan.costs));
  row["sent_bytes_forward"] = to_json(plan.costs.forward);
  row["between_nodes_bytes"] = plan.between_bytes;
  row["paper_bytes"] = plan.costs.paper_bytes;
  row["saved_bytes"] = plan.costs.saved_bytes;
  row["peak_activation_bytes"] = plan.peak_bytes;
  row["memory_bytes"] = plan.memory_bytes;
  row["flops"] = {{"forward", plan.forward_flops}, {"backward", plan.backward_flops}};
  row["steps"] = plan.steps;
  row["predicted_ms"] = {{"compute", in_ms(plan.compute_s)},
                         {"exchange", in_ms(plan.exchange_s)},
                         {"hidden", in_ms(plan.hidden_s)},
                         {"total", in_ms(plan.total_s())}};
  row["predicted_tokens_per_s"] = static_cast<double>(options.batch * options.sequence) / plan.total_s();
  return row;
}

std::string sentence(const Crossover& at, bool several_nodes) {
  const auto always = [](const Change& change) { return change.wins_before ? "always" : "never"; };
  const std::string tokens = at.tokens.at ? fmt::format("faster {} {} tokens", at.tokens.wins_before ? "up to" : "from",
                                                        format_count(std::llround(*at.tokens.at)))
                                          : fmt::format("{} faster, whatever the sequence", always(at.tokens));
  const std::string rate =
      at.bytes_per_s.at ? fmt::format("faster with links {} nodes {} {}/s", several_nodes ? "between" : "within",
                                      at.bytes_per_s.wins_before ? "above" : "below", format_bytes(*at.bytes_per_s.at))
                        : fmt::format("{} faster, whatever the link", always(at.bytes_per_s));
  return fmt::format("{} {} {} here; {}; {}", at.form, at.wins ? "overtakes" : "is behind", at.rival, tokens, rate);
}

nlohmann::json to_json(const Crossover& at, int64_t sequence) {
  const auto change = [](const Change& found) {
    return found.at ? nlohmann::json{{"at", *found.at}, {"wins_beyond", !found.wins_before}} : nlohmann::json();
  };
  return {{"form", at.form}, {"rival", at.rival},           {"sequence", sequence},
          {"wins", at.wins}, {"tokens", change(at.tokens)}, {"bytes_per_s", change(at.bytes_per_s)}};
}

void run_train(const TrainFlags& flags) {
  require_record_file(flags.common.json);
  const Machine machine = load_machine(flags.machine);
  TrainPlanOptions options = train_options(flags);
  std::vector<TrainPlan> plans;  // before anything is printed
  for (const int64_t sequence : flags.sequences) {
    options.sequence = sequence;
    plans.push_back(plan_train(machine, options));
  }
  nlohmann::json rows = nlohmann::json::array(), crossovers = nlohmann::json::array(), advice = nlohmann::json::array();
  fmt::print("predicted, one layer of {} on {}: {} rank{} on {} node{}, {}, kernel {}, {}; memory: {}\n",
             flags.model_config, machine.name, options.ranks, options.ranks > 1 ? "s" : "", options.nodes,
             options.nodes > 1 ? "s" : "", options.dtype, name(options.attention.kernel), flags.pass,
             flags.pass == "forward" ? "what exists at once; saved is what a backward pass would need"
                                     : fmt::format("{} layers' activations of attention", options.layers));
  for (size_t k = 0; k < plans.size(); ++k) {
    const int64_t sequence = options.sequence = flags.sequences[k];
    const TrainPlan& plan = plans[k];
    std::vector<std::vector<std::string>> table = {{fmt::format("{} tokens", format_count(sequence)), "sent",
                                                    "to other nodes", "paper fwd", "saved", "peak", "TFLOP", "steps",
                                                    "compute ms", "exchange ms", "hidden ms", "ms", ""}};
    for (size_t i = 0; i < plan.forms.size(); ++i) {
      const bool use = plan.best == i;
      table.push_back(table_row(plan.forms[i], use));
      rows.push_back(to_json(plan.forms[i], options, use));
    }
    fmt::print("\n");
    print_table(table);
    fmt::print("{}\n", plan.reason);
    advice.push_back({{"sequence", sequence}, {"reason", plan.reason}});
    for (const Crossover& at : find_crossovers(machine, options)) {
      fmt::print("{}\n", sentence(at, options.nodes > 1));
      crossovers.push_back(to_json(at, sequence));
    }
  }
  flush_stdout();
  write_record(flags.common, "plan train",
               {{"model_config", flags.model_config},
                {"machine", machine.name},
                {"layers", options.layers},
                {"mlp_width", options.mlp_width},
                {"sharding", flags.sharding},
                {"crossovers", crossovers},
                {"advice", advice}},
               rows);
}

void add_plan_train(CLI::App& plan) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 40);
  const auto flags = std::make_shared<TrainFlags>();
  TrainPlanOptions& options = flags->options;
  CLI::App* const command = plan.add_subcommand(
      "train", "every form at given ranks and lengths: bytes, memory and time as predicted, and the one to use");
  command->add_option("--model-config", flags->model_config, "whose widths: a config.json or a built-in name")
      ->capture_default_str();
  add_plan_machine(*command, flags->machine, options.ranks, options.nodes, options.dtype);
  add_attention_options(*command, flags->attention);
  add_list_option(*command, "--sequence", flags->sequences, "tokens of a sequence")->check(count);
  command->add_option("--batch", options.batch, "sequences")->check(count)->capture_default_str();
  command->add_option("--heads", flags->heads, "in place of the model's")->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--layers", flags->layers, "whose activations are kept for the backward pass; default: the model's")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--mlp-width", options.mlp_width, "adds the time of a gated MLP of this width to each layer's")
      ->check(CLI::Range(1, 1 << 20));
  command->add_flag("--as-published", options.as_published,
                    "absorbed's eager scores as two products and their sum, as the LAGA paper's prototype makes them");
  command->add_option("--sharding", flags->sharding, "contiguous or zigzag")->capture_default_str();
  command->add_option("--pass", flags->pass, "forward or forward+backward")
      ->check(CLI::IsMember({"forward", "forward+backward"}))
      ->capture_default_str();
  add_size_option(*command, "--memory", flags->memory,
                  "of a rank for attention's activations, as in 60GB; default: the machine's");
  command->add_option("--json", flags->common.json, "write every figure to this file");
  command->callback([flags] { run_train(*flags); });
}

std::string check_dtype(const std::string& text) {
  if (text == "bf16" || text == "fp32" || text == "fp64") return "";
  return fmt::format("expected bf16, fp32 or fp64, got '{}'", text);
}

}  // namespace

void add_plan_machine(CLI::App& command, std::string& machine, int64_t& ranks, int64_t& nodes, std::string& dtype) {
  std::string names;
  for (const std::string& name : shipped_machine_names()) names += (names.empty() ? "" : ", ") + name;
  command.add_option("--machine", machine, "a description (docs/plan.md), or one of " + names)->required();
  command.add_option("--ranks", ranks, "in all")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_option("--nodes", nodes, "that they are spread over evenly")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_option("--dtype", dtype, "bf16, fp32 or fp64")->check(check_dtype)->capture_default_str();
}

CLI::App& add_plan(CLI::App& app) {
  CLI::App* const plan = app.add_subcommand("plan", "predict, without running anything, what would take how long");
  plan->require_subcommand(1);
  add_plan_train(*plan);
  add_plan_decode(*plan);
  return *plan;
}

}  // namespace parlat
