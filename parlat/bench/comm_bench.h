#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "parlat/comm/communicator.h"

namespace parlat {

struct CommBenchOptions {
  std::vector<int64_t> bytes = {4, 4 << 10, 64 << 10, 1 << 20, 16 << 20};  // of the fp32 tensor that a rank brings
  int repeats = 20;                                                        // timed samples of each row
};

// Latency and bandwidth of every collective at every size: each result is checked exactly (InternalError), then timed.
// A sample is the slowest rank's time; short calls are timed several in a row. To be called by all ranks, which get the
// same rows: {collective, backend, ranks, bytes, ms {min, median, p90}, sent_bytes, gbytes_per_s}, where sent_bytes is
// what the rank that sends most sends in one call and gbytes_per_s is sent_bytes over the median.
// What a rank brings: all_to_all and reduce_scatter cut it in P parts (rounded up to whole elements), all others move
// the whole. Memory: up to (P + 1) times the largest size.
std::vector<nlohmann::json> bench_comm(Communicator& comm, const CommBenchOptions& options);

}  // namespace parlat
