#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "parlat/comm/traffic.h"
#include "parlat/plan/form_costs.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

// One step as metrics.jsonl tells it.
struct StepRecord {
  int64_t step = 0;  // counted from 1
  double loss = 0, gradient_norm = 0, learning_rate = 0;
  double seconds = 0;
  int64_t tokens = 0;      // of this step, all ranks
  Traffic sent;            // by this rank
  int64_t peak_bytes = 0;  // torch's memory on this rank, weights included
  double mfu = 0;          // model FLOPs over what the ranks' matrix products reach when they do nothing else
};

nlohmann::json to_json(const StepRecord& record);

SentBytes sent_bytes(const Traffic& traffic);
// {"probabilities": bytes, ...}
nlohmann::json to_json(const std::vector<MemoryMeter::Site>& sites);

}  // namespace parlat
