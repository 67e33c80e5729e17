#include "parlat/train/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr std::array<std::pair<Schedule, std::string_view>, 3> kSchedules = {
    {{Schedule::kConstant, "constant"}, {Schedule::kCosine, "cosine"}, {Schedule::kWsd, "wsd"}}};
constexpr double kWsdDecay = 0.2;

}  // namespace

std::string_view name(Schedule schedule) {
  for (const auto& [entry, text] : kSchedules) {
    if (entry == schedule) return text;
  }
  throw InternalError("a schedule without a name");
}

Schedule parse_schedule(std::string_view text) {
  for (const auto& [entry, entry_text] : kSchedules) {
    if (entry_text == text) return entry;
  }
  throw ConfigError("schedule: expected one of constant, cosine, wsd, got '{}'", text);
}

double LearningRate::at(int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const auto fall_over = [&](int64_t begin) {  // 0 at step `begin`, 1 at the last step
    const double length = static_cast<double>(std::max<int64_t>(steps - 1 - begin, 1));
    return std::clamp(static_cast<double>(step - begin) / length, 0.0, 1.0);
  };
  switch (schedule) {
    case Schedule::kConstant:
      return peak;
    case Schedule::kCosine:
      return minimum + (peak - minimum) * 0.5 * (1 + std::cos(std::numbers::pi * fall_over(warmup)));
    case Schedule::kWsd: {
      const auto stable_until = static_cast<int64_t>(static_cast<double>(steps) * (1 - kWsdDecay));
      return peak - (peak - minimum) * fall_over(std::max(warmup, stable_until));
    }
  }
  throw InternalError("a schedule without a formula");
}

}  // namespace parlat
