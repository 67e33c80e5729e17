#include "parlat/train/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "parlat/base/error.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

struct AdamWStep {
  float decay;         // factor on the weight
  float step_size;     // learning rate over the first moment's bias correction
  float second_scale;  // 1 / sqrt of the second moment's bias correction
  float gradient_scale;
  float beta1, beta2, epsilon;
};

void adamw(const AdamWStep& step, Range range, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const Tensor& gradients) {
  if (master.is_meta()) return;
  PARLAT_ASSERT(master.is_cpu(), "weights on {}", master.device().str());
  float* const w = master.mutable_data_ptr<float>();
  float* const m = exp_avg.mutable_data_ptr<float>();
  float* const v = exp_avg_sq.mutable_data_ptr<float>();
  const float* const gradient = gradients.const_data_ptr<float>();
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float g = gradient[i] * step.gradient_scale;
    m[i] = step.beta1 * m[i] + (1 - step.beta1) * g;
    v[i] = step.beta2 * v[i] + (1 - step.beta2) * g * g;
    w[i] = w[i] * step.decay - step.step_size * m[i] / (std::sqrt(v[i]) * step.second_scale + step.epsilon);
  }
}

double sum_of_squares(const Tensor& values) {
  if (values.is_meta()) return 0;
  PARLAT_ASSERT(values.is_cpu(), "gradients on {}", values.device().str());
  double sum = 0;
  const float* const value = values.const_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) sum += static_cast<double>(value[i]) * value[i];
  return sum;
}

// The part of `slot` within `shard`, counted from the shard's begin.
Range within(const FlatLayout::Slot& slot, Range shard) {
  const int64_t begin = std::max(slot.range.begin, shard.begin), end = std::min(slot.range.end, shard.end);
  return {begin - shard.begin, std::max(begin, end) - shard.begin};
}

constexpr const char* kExpAvg = ".exp_avg";
constexpr const char* kExpAvgSq = ".exp_avg_sq";

void load_shard(const SafetensorsFile& file, const FlatLayout& layout, Range shard, const std::string& suffix,
                const Tensor& into) {
  for (const FlatLayout::Slot& slot : layout.slots) {
    const Range part = within(slot, shard);
    if (part.size() <= 0) continue;
    const auto entry = file.entries().find(slot.name + suffix);
    if (entry == file.entries().end()) throw DataError("optimizer state: expected {}{}, got none", slot.name, suffix);
    if (entry->second.shape != slot.shape || entry->second.dtype != at::kFloat) {
      throw DataError("optimizer state: {}{}: expected fp32 {}, got {} {}", slot.name, suffix, shape_text(slot.shape),
                      name(entry->second.dtype), shape_text(entry->second.shape));
    }
    const int64_t begin_in_slot = part.begin + shard.begin - slot.range.begin;
    into.narrow(0, part.begin, part.size())
        .copy_(file.tensor(slot.name + suffix).flatten().narrow(0, begin_in_slot, part.size()));
  }
}

}  // namespace

ShardedAdamW::ShardedAdamW(const AdamWSpec& spec, std::vector<FlatGroup>& groups, Communicator& world)
    : spec_(spec), world_(world) {
  for (FlatGroup& group : groups) {
    const Tensor master = group.shard_weights();
    const auto zeros = [&] { return metered("optimizer state", at::zeros_like(master)); };
    shards_.push_back({group, master, zeros(), zeros(), zeros()});
  }
}

double ShardedAdamW::step(double learning_rate) {
  const at::NoGradGuard no_grad;
  std::vector<Handle> sums;
  for (Shard& shard : shards_) sums.push_back(shard.group.reduce_gradients(shard.gradients));
  double squares = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    sums[i].wait();
    shards_[i].group.zero_gradients();
    squares += sum_of_squares(shards_[i].gradients);
  }
  // The shards of all ranks together are every gradient once, experts included.
  const double norm = std::sqrt(world_.sum_over_ranks(squares, "gradient norm"));
  if (!std::isfinite(norm)) return norm;

  ++steps_;
  const double scale = spec_.clip > 0 && norm > spec_.clip ? spec_.clip / norm : 1.0;
  std::vector<Handle> gathers;
  for (Shard& shard : shards_) {
    update(shard, learning_rate, scale);
    gathers.push_back(shard.group.gather_weights(shard.master));
  }
  for (Handle& gather : gathers) gather.wait();
  return norm;
}

void ShardedAdamW::update(Shard& shard, double learning_rate, double gradient_scale) {
  const double steps = static_cast<double>(steps_);
  AdamWStep step{.decay = 1,
                 .step_size = static_cast<float>(learning_rate / (1 - std::pow(spec_.beta1, steps))),
                 .second_scale = static_cast<float>(1 / std::sqrt(1 - std::pow(spec_.beta2, steps))),
                 .gradient_scale = static_cast<float>(gradient_scale),
                 .beta1 = static_cast<float>(spec_.beta1),
                 .beta2 = static_cast<float>(spec_.beta2),
                 .epsilon = static_cast<float>(spec_.epsilon)};
  for (const FlatLayout::Slot& slot : shard.group.layout().slots) {
    const bool norm_weight = slot.shape.size() == 1;
    step.decay = norm_weight ? 1.0f : static_cast<float>(1 - learning_rate * spec_.weight_decay);
    adamw(step, within(slot, shard.group.shard()), shard.master, shard.exp_avg, shard.exp_avg_sq, shard.gradients);
  }
}

ShardedAdamW::NamedTensors ShardedAdamW::gather_state() const {
  const at::NoGradGuard no_grad;
  NamedTensors all;
  for (const Shard& shard : shards_) {
    gather(shard.group, shard.master, kMaster, all);
    gather(shard.group, shard.exp_avg, kExpAvg, all);
    gather(shard.group, shard.exp_avg_sq, kExpAvgSq, all);
  }
  return all;
}

void ShardedAdamW::gather(const FlatGroup& group, const Tensor& shard, const std::string& suffix,
                          NamedTensors& all) const {
  const auto kinds = static_cast<int>(group.layouts().size());
  std::vector<Tensor> flats;
  std::vector<Tensor> send(world_.size(), at::empty({0}, at::kFloat)), receive = send;
  send[0] = shard;
  if (world_.rank() == 0) {
    for (const FlatLayout& layout : group.layouts()) flats.push_back(at::empty({layout.size}, at::kFloat));
    for (int rank = 0; rank < world_.size(); ++rank) {
      const Range share = even_share(group.layouts()[rank % kinds].size, world_.size() / kinds, rank / kinds);
      receive[rank] = flats[rank % kinds].narrow(0, share.begin, share.size());
    }
  }
  world_.all_to_all(std::move(send), std::move(receive), "optimizer state").wait();
  for (size_t kind = 0; kind < flats.size(); ++kind) {
    for (const FlatLayout::Slot& slot : group.layouts()[kind].slots) {
      all.emplace_back(slot.name + suffix, flats[kind].narrow(0, slot.range.begin, slot.range.size()).view(slot.shape));
    }
  }
}

void ShardedAdamW::load_state(const SafetensorsFile& file, int64_t steps) {
  const at::NoGradGuard no_grad;
  for (Shard& shard : shards_) {
    const FlatLayout& layout = shard.group.layout();
    load_shard(file, layout, shard.group.shard(), kMaster, shard.master);
    load_shard(file, layout, shard.group.shard(), kExpAvg, shard.exp_avg);
    load_shard(file, layout, shard.group.shard(), kExpAvgSq, shard.exp_avg_sq);
    shard.group.gather_weights(shard.master).wait();
  }
  steps_ = steps;
}

}  // namespace parlat
