#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace parlat {

// The learning rate over the steps, after a linear warm-up from 0:
//   constant  the peak
//   cosine    half a cosine from the peak to the minimum at the last step (arXiv 1608.03983)
//   wsd       warm-up, stable, decay: the peak, then a line to the minimum over the last fifth (arXiv 2404.06395)
enum class Schedule { kConstant, kCosine, kWsd };
std::string_view name(Schedule schedule);
// Throws ConfigError with the possible values.
Schedule parse_schedule(std::string_view text);

struct LearningRate {
  Schedule schedule = Schedule::kCosine;
  double peak = 1e-3;
  double minimum = 0;
  int64_t warmup = 0;  // steps
  int64_t steps = 1;   // of the whole run
  // Of step 0 <= step < steps.
  double at(int64_t step) const;
};

}  // namespace parlat
