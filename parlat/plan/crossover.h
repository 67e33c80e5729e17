#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parlat/plan/train_plan.h"

namespace parlat {

// Where one form begins to be faster than others, or ends to be.
struct Change {
  bool wins_before = false;  // at shorter sequences; at higher rates
  std::optional<double> at;  // nothing: the same all the way
};

struct Crossover {
  std::string form, rival;  // rival: the fastest of explicit, absorbed and laga for these options
  bool wins = false;        // for these options
  Change tokens;            // the first on the way from a token a rank up to 16 million in each sequence of the batch
  Change bytes_per_s;       // the first on the way down from 1000 times the rate of the slowest link in use to a
                            // thousandth
};

// Of laga-q, ring and hybrid (its best split at each point), whether or not they fit in memory, each against the
// fastest of explicit, absorbed and laga; those that cannot run are left out. About 40 plans each; points to 1 %.
std::vector<Crossover> find_crossovers(const Machine& machine, const TrainPlanOptions& options);

}  // namespace parlat
