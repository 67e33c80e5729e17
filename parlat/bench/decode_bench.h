#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "parlat/base/spread.h"
#include "parlat/bench/layout_check.h"
#include "parlat/bench/rank_runner.h"
#include "parlat/config/layout.h"
#include "parlat/config/model_config.h"

namespace parlat {

struct DecodeBenchOptions {
  ModelConfig config;  // random weights from the seed
  LayoutSpec layout;
  std::vector<int64_t> contexts, batches;
  // Above 0: in place of batches as many sequences as fit in so many bytes of cache a rank, in whole pages, each of
  // `context` tokens after the last step.
  int64_t cache_budget = 0;
  at::ScalarType dtype = at::kBFloat16, cache_dtype = at::kBFloat16;
  int64_t steps = 8;  // timed
  uint64_t seed = 1;
};

// Of a rank: where ranks differ, the largest, and times are those of the slowest. Nothing is timed where batch is 0
// (not one sequence fits in the budget) or ok is false.
struct DecodeBenchRow {
  int64_t context = 0, batch = 0;
  Spread ms;  // of one step of the whole batch
  double tokens_per_s = 0;
  double cache_bytes_per_token = 0;     // all layers
  int64_t cache_bytes = 0;              // of the pages that the batch takes
  double cache_gb_per_s = 0;            // latents read by attention, over the whole step
  double attention_gflops = 0;          // multiply-adds times two of attention, over the whole step
  int64_t sent_bytes = 0;               // a step
  double max_error = 0, tolerance = 0;  // of attention over the whole context
  LayoutCheck step;
  bool ok = false;
};

// Decode steps over a cache of random latents, so that no prompt has to be run first. Verified, then timed:
//   steps      once a layout: whole steps over the ranks against the layout's definition (check_layout), of the model's
//              first layers with its attention as it is and the rest narrow, so that fp64 of it fits
//   attention  every case: of the first layer over the whole context, against fp64 from the same rows
// Every rank of the runner's group takes part. `observe` hears of each case. Throws ConfigError where a budget is given
// and a context is too short for the steps.
std::vector<DecodeBenchRow> bench_decode(const DecodeBenchOptions& options, const RankRunner& run_ranks,
                                         const std::function<void(const std::string&)>& observe);

nlohmann::json to_json(const DecodeBenchRow& row, const DecodeBenchOptions& options, int ranks, int threads);

// What this machine can do, for comparison: bytes read and written a second by a copy far larger than the caches, and
// fp32 products of 1024 x 1024 matrices, on `threads` threads.
struct MachineLimits {
  double copy_gb_per_s = 0, gemm_gflops = 0;
};
MachineLimits measure_limits(int threads);

}  // namespace parlat
