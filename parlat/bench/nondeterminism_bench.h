#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "parlat/bench/rank_runner.h"
#include "parlat/config/model_config.h"

namespace parlat {

// What the order of a product's sums does to training (arXiv 2607.17644, section 6): twins of one seed and one text,
// whose products are summed in orders of their own, part; a mixture of experts parts in a jump where the two first
// send a token to different experts.
struct NondeterminismOptions {
  ModelConfig experts;  // a mixture of experts; twin_models(experts) are trained
  int64_t batch = 4, sequence = 128;
  int64_t steps = 40;
  double learning_rate = 1e-3;
  at::ScalarType dtype = at::kFloat;  // fp32 or fp64
  uint64_t seed = 1;
};

// Both of the experiment's models from one with experts: every MLP as wide as what one token meets of a mixture, and
// the same without a mixture. ConfigError for a model without experts.
struct TwinModels {
  ModelConfig experts, dense;
};
TwinModels twin_models(ModelConfig experts);

// How far two twins are apart after a step. Zero where they are bit for bit the same.
struct Apart {
  double loss = 0;             // of the first twin
  double loss_difference = 0;  // |difference|
  double output = 0;           // of the final hidden states, RMS over the first twin's RMS
  double weights = 0;          // after the update, likewise
  int64_t flips = 0;           // (layer, token)s that meet other experts
};

// Where a token first met other experts.
struct Flip {
  int64_t step = 0, layer = 0, sequence = 0, position = 0;  // step from 1
};

struct TwinRun {
  std::string model;  // dense, experts
  bool shuffled = false;
  std::vector<Apart> steps;
  std::optional<Flip> first_flip;
  // How much further apart the twins are at the first flip than over the (up to 10) steps before, by the median.
  struct Jump {
    double loss = 0, output = 0;
  };
  std::optional<Jump> jump;
  Apart last() const;  // means over the last tenth of the steps, at least one; flips: their sum over all
};

struct NondeterminismResult {
  // Of one product of the model's size in a drawn order against the same in the plain one: verified before anything
  // else. ok: within what rounding allows both, and not the same bits.
  double max_error = 0, tolerance = 0;
  bool ok = false;
  std::vector<TwinRun> runs;  // dense and experts, shuffled; the same, deterministic
};

// Two ranks of the runner are the twins: they train one model each, exchange nothing and are compared after every step.
// Text: random tokens, memorised. Throws ConfigError for a model without experts, for one whose twins do not fit in
// memory_limit() and for other dtypes; Error with exit code 1 where loss or weights stop being finite, naming the step.
NondeterminismResult bench_nondeterminism(const NondeterminismOptions& options, const RankRunner& run_twins,
                                          const std::function<void(const std::string&)>& observe);

// A row a run: model, order (drawn or deterministic), steps (each with loss, loss_difference, output_difference,
// weight_difference, flips), last, and first_flip and jump where there are any.
nlohmann::json to_json(const NondeterminismResult& result);

}  // namespace parlat
