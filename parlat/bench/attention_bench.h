#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parlat/base/spread.h"
#include "parlat/bench/form_check.h"
#include "parlat/bench/rank_runner.h"
#include "parlat/plan/form_costs.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

// Which layers to measure: every combination of sequences and heads, all forms of a combination interleaved in one run,
// so that their ratios hold even when the machine's speed drifts.
struct AttentionBenchOptions {
  MlaSpec spec;                // n_heads is replaced by each of `heads`
  std::vector<int64_t> heads;  // empty: the spec's
  std::vector<int64_t> sequences = {2048};
  std::vector<TrainForm> forms = possible_train_forms(/*has_query_latent=*/false);
  AttentionOptions attention = {};
  Sharding sharding = Sharding::kContiguous;
  at::ScalarType dtype = at::kFloat;
  int64_t batch = 1;
  int64_t documents = 1;  // packed into each sequence
  bool backward = true;
  int repeats = 5;
  int64_t verify_sequence = 0;  // the longest sequence that the fp64 oracle is given; 0: verification_length
  uint64_t seed = 1;
  bool dry_run = false;       // on the meta device: bytes and memory only, of layers of any size
  bool as_published = false;  // a dry run of PublishedAttention instead
};

struct AttentionBenchRow {
  TrainForm form = TrainForm::kLaga;
  int ranks = 0;
  int64_t sequence = 0, heads = 0;
  Spread ms;                // of one pass, the slowest rank
  double tokens_per_s = 0;  // of all ranks together, by the median
  SentBytes sent;           // one rank, the whole pass; of uneven ranks the largest
  SentBytes sent_forward;
  int64_t paper_bytes = 0;                    // forward, LAGA's counting
  int64_t peak_activation_bytes = 0;          // of the rank with most: all that a pass allocates beside weights, their
                                              // gradients, the input and its gradient
  std::vector<MemoryMeter::Site> peak_sites;  // what that is, largest first
  FormCheck check;
  int64_t verified_sequence = 0;
};

// How many tokens of a timed sequence the fp64 oracle is given: as many as it takes about two seconds for, and at least
// two blocks of the eager kernel and a part of a third.
int64_t verification_length(const MlaDims& dims, int64_t batch, int64_t sequence);

// Told before each combination: "16 heads, 2048 tokens".
using BenchObserver = std::function<void(const std::string& what)>;

// Verifies each form against the fp64 oracle (outputs and all gradients; on verification_length tokens), measures
// memory and traffic of one pass, then times `repeats` passes. Gradients of weights are not summed over ranks in the
// timed pass. Rows in the order of heads, sequences, forms; check.ok says which of them verified. Throws ConfigError
// for more ranks than heads.
// A dry run measures memory and traffic only, of the same code on tensors without values; its ranks are local.
std::vector<AttentionBenchRow> bench_attention(const AttentionBenchOptions& options, const RankRunner& run_ranks,
                                               const BenchObserver& observe = nullptr);

// A row of the record; what is the same for all rows (dtype, batch, pass, ...) comes from options.
nlohmann::json to_json(const AttentionBenchRow& row, const AttentionBenchOptions& options);

}  // namespace parlat
