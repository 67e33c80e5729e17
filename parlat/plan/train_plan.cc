#include "parlat/plan/train_plan.h"

#include <algorithm>
#include <cmath>

#include "parlat/base/error.h"
#include "parlat/base/range.h"
#include "parlat/base/units.h"
#include "parlat/plan/form_time.h"
#include "parlat/plan/peak.h"

namespace parlat {

bool products_fit(const TrainPlanOptions& options) {
  const MlaDims& d = options.dims;
  const auto heads = static_cast<double>(d.n_heads), length = static_cast<double>(options.sequence);
  const auto tokens = length * static_cast<double>(options.batch) + static_cast<double>(options.ranks);
  const auto widths =
      static_cast<double>(d.d_model + d.d_q_latent.value_or(0) + 2 * d.d_qk() + d.d_v + 2 * d.d_cache());
  const double scores = options.attention.kernel == AttentionKernel::kEager ? length : 0;
  constexpr double kBytes = 16, kMost = 9e18;
  return kBytes * heads * tokens * std::max(4 * widths, scores) < kMost;
}

namespace {

void require_positive(const char* what, int64_t value) {
  if (value < 1) throw ConfigError("{}: expected at least 1, got {}", what, value);
}

void check(const Machine& machine, const TrainPlanOptions& options) {
  check_ranks(machine, options.ranks, options.nodes);
  require_positive("layers", options.layers);
  require_positive("sequence", options.sequence);
  require_positive("batch", options.batch);
  machine.gemm_in(options.dtype);
  machine.attention_in(options.dtype);
  if (options.attention.ring_groups != 0) {
    validate_form(TrainForm::kHybrid, options.ranks, options.dims.n_heads, options.dims.d_q_latent.has_value(),
                  options.attention);
  }
  if (!products_fit(options)) {
    throw ConfigError(
        "sequence: expected sizes whose products stay below 2^63, got {} heads, {} x {} tokens and {} "
        "ranks",
        options.dims.n_heads, options.batch, options.sequence, options.ranks);
  }
}

// Every form, and hybrid in the split that is asked for or else in every one: groups of several ranks, several groups.
std::vector<FormPlan> candidates(const TrainPlanOptions& options) {
  std::vector<FormPlan> plans;
  for (const TrainForm form : all_train_forms()) {
    FormPlan plan{.form = form, .attention = options.attention, .label = std::string(name(form))};
    plan.attention.ring_groups = 0;
    if (form != TrainForm::kHybrid) {
      plans.push_back(plan);
      continue;
    }
    const int64_t asked = options.attention.ring_groups;
    for (int64_t groups = asked > 0 ? asked : 2; groups <= (asked > 0 ? asked : options.ranks / 2); ++groups) {
      if (options.ranks % groups != 0 || options.ranks / groups > options.dims.n_heads) continue;
      plan.attention.ring_groups = groups;
      plan.label = fmt::format("{} {}x{}", name(form), groups, options.ranks / groups);
      plans.push_back(plan);
    }
  }
  return plans;
}

std::string why_impossible(const FormPlan& plan, const TrainPlanOptions& options) {
  try {
    validate_form(plan.form, options.ranks, options.dims.n_heads, options.dims.d_q_latent.has_value(), plan.attention);
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    return text.substr(text.find(": ") + 2);
  }
  return "";
}

void add_memory(const TrainPlanOptions& options, FormPlan& plan) {
  plan.peak_bytes = peak_bytes(options, plan);
  const int64_t waiting = options.backward ? options.layers - 1 : 0;  // a forward pass keeps nothing of its layers
  plan.memory_bytes =
      static_cast<double>(waiting) * static_cast<double>(plan.costs.saved_bytes) + static_cast<double>(plan.peak_bytes);
}

// The one to use, and by what it wins.
void choose(double memory_bytes, bool backward, TrainPlan& plan) {
  const FormPlan* second = nullptr;
  for (size_t i = 0; i < plan.forms.size(); ++i) {
    if (!plan.forms[i].misfit.empty()) continue;
    if (!plan.best || plan.forms[i].total_s() < plan.forms[*plan.best].total_s()) {
      second = plan.best ? &plan.forms[*plan.best] : nullptr;
      plan.best = i;
    } else if (!second || plan.forms[i].total_s() < second->total_s()) {
      second = &plan.forms[i];
    }
  }
  if (!plan.best) {
    plan.reason = fmt::format("nothing fits in {} a rank: more ranks{}", format_bytes(memory_bytes),
                              backward ? ", fewer tokens, or layers that are recomputed" : " or fewer tokens");
    return;
  }
  const FormPlan& best = plan.forms[*plan.best];
  if (!second) {
    plan.reason = fmt::format("{}: the only form that fits", best.label);
    return;
  }
  const double waits = second->exchange_s - best.exchange_s, computes = second->compute_s - best.compute_s;
  const auto ms = [](double seconds) { return fmt::format("{:.3g} ms", std::abs(seconds) * 1e3); };
  plan.reason = fmt::format(
      "{}: {:.3g} times as fast as {}, next best: per layer it waits {} {} for exchanges and computes "
      "{} {}",
      best.label, second->total_s() / best.total_s(), second->label, ms(waits), waits >= 0 ? "less" : "longer",
      ms(computes), computes >= 0 ? "less" : "longer");
}

}  // namespace

TrainPlan plan_train(const Machine& machine, const TrainPlanOptions& options) {
  check(machine, options);
  const double memory = options.memory_bytes > 0 ? options.memory_bytes : machine.memory_bytes;
  AttentionShape shape{.dims = options.dims,
                       .batch = options.batch,
                       .tokens = {},
                       .rank = 0,  // has most tokens and most heads
                       .element_bytes = dtype_bytes(options.dtype)};
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    shape.tokens.push_back(options.batch * even_share(options.sequence, options.ranks, rank).size());
  }
  TrainPlan plan{.forms = candidates(options), .best = {}, .reason = {}};
  for (FormPlan& form : plan.forms) {
    if (form.misfit = why_impossible(form, options); !form.misfit.empty()) continue;
    form.runs = true;
    shape.attention = form.attention;
    form.costs = form_costs(form.form, shape);
    if (!options.backward) form.costs.backward = {};
    add_memory(options, form);
    estimate_time(machine, options, form);
    if (form.memory_bytes > memory) {
      form.misfit = fmt::format("{} of activations in {}", format_bytes(form.memory_bytes), format_bytes(memory));
    }
  }
  choose(memory, options.backward, plan);
  return plan;
}

}  // namespace parlat
