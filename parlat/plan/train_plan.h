#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/config/parallel.h"
#include "parlat/plan/form_costs.h"
#include "parlat/plan/machine.h"

namespace parlat {

// One MLA layer, its sequence split over all ranks, of which each node has as many consecutive ones as any other.
struct TrainPlanOptions {
  MlaDims dims;
  int64_t layers = 1;  // whose saved tensors wait for their backward pass
  int64_t ranks = 1, nodes = 1;
  int64_t sequence = 4096, batch = 1;
  std::string dtype = "bf16";
  AttentionOptions attention = {};
  Sharding sharding = Sharding::kZigzag;
  bool backward = true;
  // Absorbed's eager scores as LAGA's prototype makes them: a product over the latent and one over rope, then their
  // sum.
  bool as_published = false;
  int64_t mlp_width = 0;    // of a gated MLP on local tokens that belongs to the layer's time; 0: attention alone
  double memory_bytes = 0;  // for attention's activations on a rank; 0: all that the machine has
};

// One form, as the rank with most tokens and heads sees it.
struct FormPlan {
  TrainForm form = TrainForm::kLaga;
  AttentionOptions attention = {};
  std::string label;        // the form's name, and hybrid's groups x ranks of a group
  std::string misfit = {};  // why it cannot run or does not fit; empty where it does
  FormCosts costs = {};
  int64_t between_bytes = 0;                     // of those sent, what crosses to other nodes
  int64_t peak_bytes = 0;                        // plan/peak.h
  double memory_bytes = 0;                       // that peak, and what other layers save for a backward pass
  double forward_flops = 0, backward_flops = 0;  // of a layer: products and visible pairs, multiply-adds as two
  double compute_s = 0;
  double exchange_s = 0;  // waited for
  double hidden_s = 0;    // exchanged meanwhile
  int64_t steps = 0;      // exchanges one after the other
  bool runs = false;      // all but memory
  double total_s() const { return compute_s + exchange_s; }
};

struct TrainPlan {
  std::vector<FormPlan> forms;
  std::optional<size_t> best;  // the fastest that fits
  std::string reason;          // one sentence
};

// Predicts every form (of hybrid: every split, or that of options.attention.ring_groups) on a machine. A form that
// cannot run says why and has no figures. Throws ConfigError for sizes that are not positive, do not divide, or whose
// products leave 63 bits, and for a description that lacks what is needed.
//   cost  O(ranks) for each form
TrainPlan plan_train(const Machine& machine, const TrainPlanOptions& options);

// Whether the largest products that costs are made of stay below 2^63.
bool products_fit(const TrainPlanOptions& options);

}  // namespace parlat
