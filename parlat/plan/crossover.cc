#include "parlat/plan/crossover.h"

#include <algorithm>
#include <cmath>

namespace parlat {

namespace {

constexpr int64_t kMostTokens = 1 << 24;
constexpr double kRates = 1024, kStep = 4, kPrecision = 1.01;

bool is_challenger(TrainForm form) {
  return form != TrainForm::kExplicit && form != TrainForm::kAbsorbed && form != TrainForm::kLaga;
}

// By how many seconds `challenger` is faster than the fastest rival, whose name is left in `rival`. Nothing where one
// side cannot run.
std::optional<double> lead(const Machine& machine, const TrainPlanOptions& options, TrainForm challenger,
                           std::string* rival = nullptr) {
  double own = HUGE_VAL, best = HUGE_VAL;
  for (const FormPlan& plan : plan_train(machine, options).forms) {
    if (!plan.runs) continue;
    if (plan.form == challenger) own = std::min(own, plan.total_s());
    if (is_challenger(plan.form) || plan.total_s() >= best) continue;
    best = plan.total_s();
    if (rival != nullptr) *rival = plan.label;
  }
  if (own == HUGE_VAL || best == HUGE_VAL) return std::nullopt;
  return best - own;
}

// The first change of wins(x) on the way from `from` to `to`, up or down.
Change first_change(double from, double to, const auto& wins) {
  const bool start = wins(from);
  double same = from;
  while (same != to) {
    double other = to > from ? std::min(same * kStep, to) : std::max(same / kStep, to);
    if (wins(other) == start) {
      same = other;
      continue;
    }
    while (std::max(same / other, other / same) > kPrecision) {
      const double middle = std::sqrt(same * other);
      (wins(middle) == start ? same : other) = middle;
    }
    return {.wins_before = start, .at = other};
  }
  return {.wins_before = start, .at = {}};
}

}  // namespace

std::vector<Crossover> find_crossovers(const Machine& machine, const TrainPlanOptions& options) {
  std::vector<Crossover> crossovers;
  for (const TrainForm form : all_train_forms()) {
    Crossover found{.form = std::string(name(form)), .rival = {}, .wins = false, .tokens = {}, .bytes_per_s = {}};
    const std::optional<double> here = lead(machine, options, form, &found.rival);
    if (!is_challenger(form) || !here || options.ranks == 1) continue;
    found.wins = *here > 0;

    TrainPlanOptions elsewhere = options;
    elsewhere.sequence = kMostTokens;
    while (!products_fit(elsewhere)) elsewhere.sequence /= 2;
    const int64_t least = std::min(options.ranks, options.sequence),
                  most = std::max(elsewhere.sequence, options.sequence);
    found.tokens = first_change(static_cast<double>(least), static_cast<double>(most), [&](double tokens) {
      elsewhere.sequence = std::llround(tokens);
      return *lead(machine, elsewhere, form) > 0;
    });

    Machine other = machine;
    double& rate = options.nodes > 1 ? other.between->bytes_per_s : other.within.bytes_per_s;
    const double own_rate = rate;
    found.bytes_per_s = first_change(own_rate * kRates, own_rate / kRates, [&](double bytes_per_s) {
      rate = bytes_per_s;
      return *lead(other, options, form) > 0;
    });
    crossovers.push_back(std::move(found));
  }
  return crossovers;
}

}  // namespace parlat
