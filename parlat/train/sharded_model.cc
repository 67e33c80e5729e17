#include "parlat/train/sharded_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "parlat/train/forms.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

// What initialize allocates, on the meta device.
void initialize_shapes(const std::vector<WeightRow>& table, at::ScalarType dtype) {
  const at::TensorOptions shapes(at::kMeta);
  for (const WeightRow& row : table) row.set(at::empty(row.shape, shapes).to(row.keep_fp32 ? at::kFloat : dtype));
}

}  // namespace

ShardedModel::ShardedModel(const ModelConfig& config, const Mesh& mesh, const std::filesystem::path& directory,
                           uint64_t seed, at::ScalarType dtype, at::Device device)
    : config_(config),
      mesh_(mesh),
      table_(weight_table(config, mesh.experts_of(mesh.experts->rank(), config), weights_)),
      attention_(make_attention(mesh.spec.form, *mesh.sequence, config.mla.dims, mesh.spec.attention)),
      transformer_(config_, weights_, *attention_, *mesh.experts) {
  if (device.is_meta()) {
    initialize_shapes(table_, dtype);
  } else if (directory.empty()) {
    initialize(table_, config, seed, dtype);
  } else {
    load_weights(directory, config, table_, dtype);
  }
  groups_.emplace_back(/*experts=*/false, config, table_, mesh);
  groups_.emplace_back(/*experts=*/true, config, table_, mesh);
  if (config.tied_embeddings) weights_.head = weights_.embedding;
}

SequenceShards ShardedModel::shards(int64_t sequence) const {
  return shard_sequence(mesh_.spec.sharding, sequence, mesh_.sequence->size());
}

Tensor ShardedModel::local(const Tensor& x_BS) const {
  return local_tokens(x_BS, shards(x_BS.size(1)), mesh_.sequence->rank());
}

Tensor ShardedModel::hidden(const Batch& batch, const Transformer::Observer& observe) const {
  const TokenShard shard =
      make_token_shard(config_.mla, batch.documents, shards(batch.documents.sequence()), mesh_.sequence->rank());
  return transformer_.forward(local(batch.tokens_BS), shard, observe);
}

Tensor ShardedModel::loss_sum(const Batch& batch, const Transformer::Observer& observe) const {
  return token_loss_sum(transformer_, hidden(batch, observe).flatten(0, 1), local(batch.targets_BS).flatten());
}

std::string ShardedModel::first_non_finite(const Batch& batch) const {
  const at::NoGradGuard no_grad;
  constexpr double kNone = std::numeric_limits<double>::max();
  double first = kNone;
  std::vector<std::string> stages;
  const auto look = [&](const std::string& stage, const Tensor& activation) {
    if (first == kNone && !activation.isfinite().all().item<bool>()) first = static_cast<double>(stages.size());
    stages.push_back(stage);
  };
  const Tensor last = hidden(batch, look);
  look("head", token_loss_sum(transformer_, last.flatten(0, 1), local(batch.targets_BS).flatten()));
  first = -mesh_.world.max_over_ranks(-first, "first non-finite activation");
  return first == kNone ? "" : stages[static_cast<size_t>(first)];
}

}  // namespace parlat
