#pragma once

#include "parlat/plan/machine.h"

namespace parlat {

// Round figures, so that times can be written out: products 1e12 FLOP/s, attention 5e11, memory 1e11 B/s, links 1e9 and
// 1e8 B/s, in bf16.
inline Machine round_machine() {
  Machine machine;
  machine.name = "round";
  machine.ranks_per_node = machine.ranks_at_full_rate = 8;
  machine.memory_bytes = 80e9;
  machine.memory_bytes_per_s = 1e11;
  machine.layer_overhead_s = 1e-3;
  machine.within = {.latency_s = 1e-5, .bytes_per_s = 1e9};
  machine.between = Link{.latency_s = 1e-4, .bytes_per_s = 1e8};
  machine.gemm["bf16"] = {.sizes = {1}, .rates = {1e12}};
  machine.attention["bf16"] = {.fused = {5e11, 5e11}, .eager = {}, .widest_fused = {}, .decode_rate = {}};
  return machine;
}

}  // namespace parlat
