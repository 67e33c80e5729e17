#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include "parlat/comm/communicator.h"
#include "parlat/train/settings.h"

namespace parlat {

struct TrainResult {
  int64_t steps = 0;  // behind the newest checkpoint, earlier runs included
  bool interrupted = false;
  std::optional<double> loss, evaluation_loss;  // of the last step taken here, and after it
  std::optional<double> mfu;                    // model FLOPs over what the matrix products reach here; median step
  double tokens_per_s = 0;                      // over all ranks, median step
  double sent_bytes_per_token = 0;              // over all ranks
  Traffic sent;                                 // by this rank in one step
  int64_t peak_bytes = 0;                       // of torch's memory, largest rank
  std::filesystem::path checkpoint, metrics;
};

// Trains on the ranks of `world`, each of which calls this with the same arguments. Losses are sums over all tokens of
// all ranks and micro-batches over their number, gradients are sums: nothing depends on how tokens are spread but
// rounding.
//
// OUT/metrics.jsonl has a line a step and a line an evaluation, OUT/checkpoints what is resumed from: at the same ranks
// the run goes on bit for bit as if it had never stopped. `stop_requested` is asked on every rank after every step;
// when any says yes, all save a checkpoint and return.
//
// Throws ConfigError (settings, a checkpoint of another run, OUT in use), DataError (checkpoints that cannot be read or
// written), CommError, and Error with exit code 1 where loss or gradient stop being finite, naming step and stage.
TrainResult train(const TrainSettings& settings, const ModelConfig& config, const TrainingText& text,
                  Communicator& world, const std::function<bool()>& stop_requested);

}  // namespace parlat
