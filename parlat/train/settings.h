#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "parlat/config/model_config.h"
#include "parlat/config/parallel.h"
#include "parlat/train/data.h"
#include "parlat/train/optimizer.h"
#include "parlat/train/schedule.h"

namespace parlat {

// Everything that says what a training run does, besides the model and the text themselves.
struct TrainSettings {
  std::filesystem::path out;   // metrics.jsonl and checkpoints/
  std::filesystem::path init;  // a Hugging Face directory whose weights a new run starts from; empty: random ones
  bool resume = false;
  ParallelSpec parallel;
  int64_t batch = 4;       // sequences over all data ranks in one micro-batch
  int64_t accumulate = 1;  // micro-batches a step
  int64_t steps = 100;
  LearningRate learning_rate;
  AdamWSpec adamw;
  int64_t evaluate_every = 0;                          // steps; 0: at the end only
  int64_t checkpoint_every = 0;                        // steps; 0: at the end only
  int64_t keep = 3;                                    // checkpoints
  std::map<std::string, std::string> tokenizer_files;  // by name, beside the weights of every checkpoint
  at::ScalarType dtype = at::kFloat;
  uint64_t seed = 1;
  bool quiet = false;
};

// Throws ConfigError, before anything is allocated, for counts and rates that can't be and batches that the data ranks
// don't divide.
void validate(const TrainSettings& settings);
// And without a folder to write to; DataError for a text of fewer sequences than one step takes, which would repeat
// them within the step.
void validate(const TrainSettings& settings, const PackedText& training);

// What a checkpoint remembers: under "fixed" what every step's mathematics rests on (model, text, batch, seed, dtype),
// under "changeable" what a run may be resumed with at will (learning rate, form, kernel, ranks).
nlohmann::json describe(const TrainSettings& settings, const ModelConfig& config, const PackedText& training);

// Throws ConfigError listing each fixed setting that differs with both values; warns of the changeable ones. DataError,
// which begins with `name`, where the checkpoint's are no settings.
void require_same_run(const nlohmann::json& checkpoint, const nlohmann::json& now, const std::string& name);

}  // namespace parlat
