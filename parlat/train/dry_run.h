#pragma once

#include <vector>

#include "parlat/comm/communicator.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/train/settings.h"

namespace parlat {

struct DryRun {
  int64_t peak_bytes = 0;                     // of torch's memory on this rank
  std::vector<MemoryMeter::Site> peak_sites;  // what that is, largest first
  Traffic sent;                               // by this rank
};

// One step of a training run without values: weights, optimizer, `accumulate` micro-batches of one document a sequence
// forward and backward, and the update, all of the trainer's own code on the meta device. Routed experts get an even
// share of the tokens. Every rank of `world`, which is local, calls it with the same arguments. Throws ConfigError
// where validate(settings) and make_mesh do, and where the positions of all tokens don't fit in memory.
DryRun dry_run_step(const TrainSettings& settings, const ModelConfig& config, int64_t sequence, Communicator& world);

}  // namespace parlat
