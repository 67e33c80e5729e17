#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/plan_flags.h"
#include "parlat/base/units.h"
#include "parlat/plan/decode_plan.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string model_config = "v3", machine, weights;
  std::vector<int64_t> contexts = {4096, 32768};
  int64_t layers = 0, memory = 0;
  DecodePlanOptions options;
};

DecodePlanOptions decode_options(const Flags& flags) {
  DecodePlanOptions options = flags.options;
  options.config = load_model_config(flags.model_config);
  if (flags.layers > 0) options.config.n_layers = flags.layers;
  options.memory_bytes = static_cast<double>(flags.memory);
  if (!flags.weights.empty()) options.weight_element_bytes = flags.weights == "fp8" ? 1 : dtype_bytes(flags.weights);
  return options;
}

// Of mla: its largest batch beside the largest, otherwise the same; nothing where that does not fit.
const DecodeStep* step_beside(const LayoutPlan& mla, const DecodeStep& step, bool largest) {
  if (mla.steps.empty()) return nullptr;
  if (largest) return &mla.steps.back();
  const auto same = std::find_if(mla.steps.begin(), mla.steps.end() - 1,
                                 [&](const DecodeStep& of_mla) { return of_mla.batch == step.batch; });
  return same == mla.steps.end() - 1 || !same->misfit.empty() ? nullptr : &*same;
}

std::vector<std::string> table_row(const LayoutPlan& plan, const DecodeStep* step, const DecodeStep* first) {
  std::vector<std::string> row = {plan.label, fmt::format("{}", plan.groups)};
  if (!plan.placed) return {plan.label, row[1], "-", "-", "-", "-", "-", "-", "-", "-", "-", plan.misfit};
  row.push_back(format_bytes(plan.cache_bytes_per_token));
  row.push_back(format_bytes(plan.weight_bytes));
  row.push_back(format_count(plan.largest_batch));
  row.push_back(format_count(plan.largest_context));
  if (step == nullptr) {
    row.insert(row.end(), {"-", "-", "-", "-", "-", plan.misfit});
    return row;
  }
  row.push_back(format_count(step->batch));
  if (!step->misfit.empty()) {
    row.insert(row.end(), {"-", "-", "-", "-", step->misfit});
    return row;
  }
  row.push_back(format_bytes(step->weight_bytes + step->cache_bytes));
  row.push_back(format_bytes(step->sent_bytes));
  row.push_back(fmt::format("{:.4g}", (step->compute_s + step->exchange_s) * 1e3));
  row.push_back(fmt::format("{:.4g}", step->tokens_per_s()));
  row.push_back(first != nullptr ? fmt::format("{:.2f}", step->tokens_per_s() / first->tokens_per_s()) : "");
  return row;
}

nlohmann::json to_json(const LayoutPlan& plan, const DecodePlanOptions& options, const DecodeStep* step) {
  nlohmann::json row = {{"layout", plan.label},   {"groups", plan.groups},      {"ranks", options.ranks},
                        {"nodes", options.nodes}, {"context", options.context}, {"dtype", options.dtype},
                        {"pass", "decode"},       {"predicted", true},          {"fits", plan.misfit.empty()},
                        {"misfit", plan.misfit}};
  if (!plan.placed) return row;
  row["cache_bytes_per_token"] = plan.cache_bytes_per_token;
  row["weight_bytes"] = plan.weight_bytes;
  row["largest_batch"] = plan.largest_batch;
  row["largest_context"] = plan.largest_context;
  if (step == nullptr) return row;
  row["batch"] = step->batch;
  if (!step->misfit.empty()) {
    row["fits"] = false;
    row["misfit"] = step->misfit;
    return row;
  }
  row["read_bytes"] = {{"weights", step->weight_bytes}, {"cache", step->cache_bytes}};
  row["sent_bytes"] = {{"total", step->sent_bytes}};
  row["predicted_ms"] = {{"compute", step->compute_s * 1e3}, {"exchange", step->exchange_s * 1e3}};
  row["predicted_tokens_per_s"] = step->tokens_per_s();
  return row;
}

void run(const Flags& flags) {
  require_record_file(flags.common.json);
  const Machine machine = load_machine(flags.machine);
  DecodePlanOptions options = decode_options(flags);
  std::vector<std::vector<LayoutPlan>> by_context;  // before anything is printed
  for (const int64_t context : flags.contexts) {
    options.context = context;
    by_context.push_back(plan_decode(machine, options));
  }
  nlohmann::json rows = nlohmann::json::array();
  fmt::print("predicted, {} of {} layers on {}: {} rank{} on {} node{}, {}\n", flags.model_config,
             options.config.n_layers, machine.name, options.ranks, options.ranks > 1 ? "s" : "", options.nodes,
             options.nodes > 1 ? "s" : "", options.dtype);
  for (size_t k = 0; k < by_context.size(); ++k) {
    const int64_t context = options.context = flags.contexts[k];
    const std::vector<LayoutPlan>& plans = by_context[k];
    std::vector<std::vector<std::string>> table = {
        {fmt::format("{} stored", format_count(context)), "groups", "cache a token", "weights", "largest batch",
         "largest context", "batch", "read a step", "sent a step", "ms", "tokens/s", "over mla"}};
    for (const LayoutPlan& plan : plans) {
      if (plan.steps.empty()) {
        table.push_back(table_row(plan, nullptr, nullptr));
        rows.push_back(to_json(plan, options, nullptr));
      }
      for (size_t i = 0; i < plan.steps.size(); ++i) {
        const bool largest = i + 1 == plan.steps.size();
        table.push_back(table_row(plan, &plan.steps[i], step_beside(plans.front(), plan.steps[i], largest)));
        rows.push_back(to_json(plan, options, &plan.steps[i]));
      }
    }
    fmt::print("\n");
    print_table(table);
    if (std::all_of(plans.begin(), plans.end(), [](const LayoutPlan& plan) { return plan.steps.empty(); })) {
      fmt::print("nothing fits: more ranks, shorter contexts, or smaller weights (--weights fp8)\n");
    }
  }
  write_record(
      flags.common, "plan decode",
      {{"model_config", flags.model_config},
       {"machine", machine.name},
       {"layers", options.config.n_layers},
       {"memory_bytes", flags.memory > 0 ? nlohmann::json(flags.memory) : nlohmann::json(machine.memory_bytes)},
       {"attention_only", options.attention_only}},
      rows);
}

}  // namespace

void add_plan_decode(CLI::App& plan) {
  const CLI::Range count(int64_t{1}, int64_t{1} << 40);
  const auto flags = std::make_shared<Flags>();
  DecodePlanOptions& options = flags->options;
  CLI::App* const command = plan.add_subcommand(
      "decode", "every layout at given ranks and contexts: cache, largest batch, bytes and tokens/s as predicted");
  command->add_option("--model-config", flags->model_config, "a config.json or a built-in name")->capture_default_str();
  add_plan_machine(*command, flags->machine, options.ranks, options.nodes, options.dtype);
  command->add_option("--weights", flags->weights, "fp8, or one of --dtype's; default: --dtype")
      ->check(CLI::IsMember({"fp8", "bf16", "fp32", "fp64"}));
  add_list_option(*command, "--context", flags->contexts, "tokens stored")->check(count);
  add_list_option(*command, "--batch", options.batches, "sequences, besides the most that fit")->check(count);
  command->add_option("--layers", flags->layers, "in place of the model's")->check(CLI::Range(1, 1 << 20));
  command->add_flag("--attention-only", options.attention_only, "without MLP, experts, embedding and head");
  command->add_flag("--split-projections", options.split_projections,
                    "slices share out queries and outputs, and exchange them; otherwise each computes all");
  command->add_flag("--two-batches", options.two_batches, "one computes while the other exchanges, where faster");
  add_size_option(*command, "--memory", flags->memory,
                  "of a rank, for weights and cache, as in 80GB; default: the machine's");
  command->add_option("--json", flags->common.json, "write every figure to this file");
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
