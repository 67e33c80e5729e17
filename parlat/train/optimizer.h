#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "parlat/io/safetensors.h"
#include "parlat/train/flat_group.h"

namespace parlat {

struct AdamWSpec {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // of matrices; norms have none
  double clip = 1.0;          // the largest norm of the whole gradient; 0: any
};

// AdamW (arXiv 1711.05101) whose state is split over the ranks that hold copies of a weight: dense weights over all
// ranks, experts over the ranks of equal experts (ZeRO stage 1, arXiv 1910.02054). Weights may be bf16: the shard's
// master copy and both moments are fp32. Gradients are sums over ranks and micro-batches, never averages: the loss is
// divided by the number of tokens of all of them beforehand.
//
//   a rank keeps   n (2 or 4) bytes of weights, 4 n of gradients, 12 n / P of state
//   sent a step    4 n (P-1)/P of gradients (reduce-scatter) and n (2 or 4) (P-1)/P of weights (gather)
class ShardedAdamW {
 public:
  // The groups and the communicator outlive the optimizer.
  ShardedAdamW(const AdamWSpec& spec, std::vector<FlatGroup>& groups, Communicator& world);

  // One update from the gradients collected since the last. Returns the norm of the whole gradient before clipping;
  // where that is not finite nothing changes but the gradients, which are dropped in any case.
  double step(double learning_rate);

  static constexpr const char* kMaster = ".master";
  using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
  // Collective. On rank 0 NAME + kMaster, and likewise .exp_avg and .exp_avg_sq, fp32, of every trained tensor of the
  // whole model (12 bytes a parameter); nothing elsewhere.
  NamedTensors gather_state() const;
  // Takes this rank's parts from such tensors, whatever the mesh they were written on, and renews the weights. `steps`
  // were taken. Throws DataError for a tensor that is missing or misshapen.
  void load_state(const SafetensorsFile& file, int64_t steps);

 private:
  // Of one group's shard, fp32.
  struct Shard {
    FlatGroup& group;
    Tensor master, exp_avg, exp_avg_sq, gradients;
  };
  void update(Shard& shard, double learning_rate, double gradient_scale);
  void gather(const FlatGroup& group, const Tensor& shard, const std::string& suffix, NamedTensors& all) const;

  AdamWSpec spec_;
  Communicator& world_;
  std::vector<Shard> shards_;
  int64_t steps_ = 0;
};

}  // namespace parlat
