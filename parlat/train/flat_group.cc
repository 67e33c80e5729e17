#include "parlat/train/flat_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "parlat/kernels/gradient_sum.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

constexpr int64_t kCacheLine = 32;  // elements of 2 bytes

// The trained rows of the table: experts only, or all others.
FlatLayout layout_of(const std::vector<WeightRow>& table, bool experts) {
  FlatLayout layout;
  for (const WeightRow& row : table) {
    if (!row.trained || row.expert != experts) continue;
    const int64_t count = c10::multiply_integers(row.shape);
    layout.slots.push_back({row.name, row.shape, {layout.size, layout.size + count}});
    layout.size += (count + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  return layout;
}

std::vector<FlatLayout> layouts_of(bool experts, const ModelConfig& config, const Mesh& mesh) {
  std::vector<FlatLayout> layouts;
  for (int64_t kind = 0; kind < (experts ? mesh.spec.expert : 1); ++kind) {
    ModelWeights sizes_only;
    layouts.push_back(layout_of(weight_table(config, mesh.experts_of(kind, config), sizes_only), experts));
  }
  return layouts;
}

}  // namespace

FlatGroup::FlatGroup(bool experts, const ModelConfig& config, const std::vector<WeightRow>& table, const Mesh& mesh)
    : layouts_(layouts_of(experts, config, mesh)),
      kind_(mesh.world.rank() % layouts_.size()),
      replicas_(experts ? *mesh.expert_replicas : mesh.world),
      shard_(even_share(layout().size, replicas_.size(), replicas_.rank())) {
  std::map<std::string, Tensor*> tensors;
  for (const WeightRow& row : table) tensors[row.name] = row.tensor;
  const at::TensorOptions options =
      layout().slots.empty() ? at::TensorOptions(at::kFloat) : tensors[layout().slots[0].name]->options();
  weights_ = metered("weights", at::zeros({layout().size}, options));
  gradients_ = metered("gradients", at::zeros({layout().size}, options.dtype(at::kFloat)));
  for (const FlatLayout::Slot& slot : layout().slots) {
    Tensor& tensor = *tensors[slot.name];
    const Tensor place = weights_.narrow(0, slot.range.begin, slot.range.size()).view(slot.shape);
    place.copy_(tensor);
    tensor = place.detach().requires_grad_();
    sum_gradients(tensor, gradients_.narrow(0, slot.range.begin, slot.range.size()).view(slot.shape));
  }
}

std::vector<Tensor> FlatGroup::shares(const Tensor& flat) const {
  std::vector<Tensor> parts;
  for (int p = 0; p < replicas_.size(); ++p) {
    const Range share = even_share(layout().size, replicas_.size(), p);
    parts.push_back(flat.narrow(0, share.begin, share.size()));
  }
  return parts;
}

Tensor FlatGroup::shard_weights() const {
  return metered("optimizer state",
                 weights_.narrow(0, shard_.begin, shard_.size()).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
}

Handle FlatGroup::reduce_gradients(const Tensor& shard_sum) {
  if (layout().size == 0) return {};
  return replicas_.reduce_scatter(shares(gradients_), shard_sum, "gradients");
}

void FlatGroup::zero_gradients() { gradients_.zero_(); }

Handle FlatGroup::gather_weights(const Tensor& shard_master) {
  if (layout().size == 0) return {};
  const bool same_dtype = weights_.scalar_type() == at::kFloat;
  const Tensor rounded =
      same_dtype ? shard_master : metered("updated weights", shard_master.to(weights_.scalar_type()));
  return replicas_.all_gather(rounded, shares(weights_), "updated weights");
}

}  // namespace parlat
