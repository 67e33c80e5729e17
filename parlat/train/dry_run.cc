#include "parlat/train/dry_run.h"

#include <ATen/ATen.h>

#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/tensor/meta_device.h"
#include "parlat/train/sharded_model.h"

namespace parlat {

namespace {

Batch shape_of_batch(int64_t sequences, int64_t sequence) {
  const at::TensorOptions integers = at::TensorOptions(at::kMeta).dtype(at::kLong);
  return {.tokens_BS = at::empty({sequences, sequence}, integers),
          .targets_BS = at::empty({sequences, sequence}, integers),
          .documents = Documents::whole(sequences, sequence)};
}

}  // namespace

DryRun dry_run_step(const TrainSettings& settings, const ModelConfig& config, int64_t sequence, Communicator& world) {
  validate(settings);
  if (sequence < 1) throw ConfigError("sequence: expected at least 1, got {}", sequence);
  const int64_t sequences = settings.batch / settings.parallel.data;
  require_memory_for_tokens(static_cast<double>(sequences) * static_cast<double>(sequence), world.size());
  prepare_meta_device();
  MemoryMeter meter(/*with_sites=*/true);
  const MemoryMeter::Scope scope(meter);
  const Mesh mesh = make_mesh(settings.parallel, config, world);
  ShardedModel model(config, mesh, {}, settings.seed, settings.dtype, at::kMeta);
  ShardedAdamW optimizer(settings.adamw, model.groups(), world);

  const Traffic before = world.traffic();
  const Batch batch = shape_of_batch(sequences, sequence);
  for (int64_t micro = 0; micro < settings.accumulate; ++micro) model.loss_sum(batch).backward();
  optimizer.step(settings.learning_rate.at(0));
  return {.peak_bytes = meter.peak_bytes(), .peak_sites = meter.peak_sites(), .sent = world.traffic() - before};
}

}  // namespace parlat
