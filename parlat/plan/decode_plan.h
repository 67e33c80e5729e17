#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parlat/config/layout.h"
#include "parlat/config/model_config.h"
#include "parlat/plan/machine.h"

namespace parlat {

// One decode step, a token of each of `batch` sequences that have `context` tokens stored, under tensor parallelism
// over all ranks.
struct DecodePlanOptions {
  ModelConfig config;
  int64_t ranks = 1, nodes = 1;
  int64_t context = 4096;
  std::vector<int64_t> batches = {};  // besides the largest that fits
  std::string dtype = "bf16";         // of weights and cache, and of what is sent
  double weight_element_bytes = 0;    // 0: dtype's; 1 for fp8
  double memory_bytes = 0;            // for weights and cache of a rank; 0: all that the machine has
  bool attention_only = false;        // no MLP, experts, embedding and head: neither their weights nor their time
  // Slices that attend with the same heads share out w_uq and w_o: queries are gathered, outputs reduce-scattered.
  // Otherwise, as in parlat's decoder, each has them whole.
  bool split_projections = false;
  // A batch may run as two, one computing while the other exchanges; parlat's decoder doesn't.
  bool two_batches = false;
};

// A step with a batch, on the rank that holds most.
struct DecodeStep {
  int64_t batch = 0;
  double weight_bytes = 0, cache_bytes = 0;  // read
  double sent_bytes = 0;
  double compute_s = 0, exchange_s = 0;  // exchange: what is waited for
  std::string misfit = {};               // why memory does not hold the batch; it has no other figures then
  double tokens_per_s() const { return static_cast<double>(batch) / (compute_s + exchange_s); }
};

struct LayoutPlan {
  std::string label;  // the layout's name, or gqa
  int64_t groups = 1;
  std::string misfit = {};  // why it cannot be, or holds no sequence; empty where it does
  bool placed = false;
  double cache_bytes_per_token = 0;  // of all layers, on the rank with the widest slice
  double weight_bytes = 0;           // of the rank
  int64_t largest_batch = 0;         // at options.context
  int64_t largest_context = 0;       // of one sequence
  std::vector<DecodeStep> steps =
      {};  // of options.batches and, last, of the largest batch; none where no sequence fits
};

// Predicts mla, gla, tpla and tpla-dcp with 2, 4 and 8 groups, dcp, and as a yardstick the same model with
// grouped-query attention: as many query heads, 8 key heads of 128 columns, the same weights. Throws ConfigError as
// plan_train does.
//   step  weights a rank holds are read once (of experts those that a batch is expected to visit), its cache once;
//         products at gemm's rate for the batch or at memory's, whichever is slower, attention over the cache likewise
//   sent  two all-reduces of [batch, D] a layer, what docs/decoding.md lists for dcp, and with projections split
//         between G slices of h heads queries h/G (G-1) (N+R) and outputs (h - h/G) V
//   two batches, where faster: weights, fixed times and latencies twice; of exchanges the machine's overlap is hidden
std::vector<LayoutPlan> plan_decode(const Machine& machine, const DecodePlanOptions& options);

}  // namespace parlat
