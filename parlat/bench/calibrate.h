#pragma once

#include <cstdint>
#include <vector>

#include "parlat/bench/rank_runner.h"
#include "parlat/config/model_config.h"
#include "parlat/plan/machine.h"
#include "parlat/tensor/shape.h"

namespace parlat {

struct CalibrateOptions {
  MlaDims dims;  // whose widths the kernels are measured with, on 4 heads
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16};
  int nodes = 1;                   // that consecutive ranks are spread over evenly
  int64_t ranks_at_full_rate = 1;  // of a node
  double node_memory_bytes = 0;
  bool quick = false;  // fewer repeats and shorter sequences
};

// What plan/ needs to know of the machine that the ranks run on, all of them working at once: rates of products and
// kernels by dtype, of copies, latency and rate of all-to-all within a node and between nodes, what an exchange hides
// behind a product, and what a layer of hardly any work takes. The best of several; a few seconds, quick about one a
// dtype.
Machine calibrate(const CalibrateOptions& options, const RankRunner& run_ranks);

}  // namespace parlat
