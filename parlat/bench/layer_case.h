#pragma once

#include <cstdint>

#include "parlat/comm/communicator.h"
#include "parlat/config/parallel.h"
#include "parlat/mla/documents.h"
#include "parlat/mla/oracle.h"
#include "parlat/model/attention.h"

namespace parlat {

// One attention layer with its input and the gradient of its output: a measurement's subject, the same on every rank.
// Ranks of one process share its tensors.
struct LayerCase {
  MlaWeights weights;
  Tensor x_BSD, grad_out_BSD;
  Documents documents;
  Sharding sharding = Sharding::kContiguous;

  int64_t batch() const { return x_BSD.size(0); }
  int64_t sequence() const { return x_BSD.size(1); }
  SequenceShards shards(int ranks) const;
};

struct LayerCaseShape {
  int64_t batch = 1;
  int64_t sequence = 0;
  int64_t documents = 1;  // packed into each sequence, lengths as even as possible
  Sharding sharding = Sharding::kContiguous;
  uint64_t seed = 1;
};
// Seeded normal input in the dtype of the weights; shapes only where those are on the meta device.
LayerCase make_layer_case(MlaWeights weights, const LayerCaseShape& shape);

// What one rank holds of a case. Weights share the case's storage.
struct RankLayer {
  MlaWeights weights;
  Tensor x_BSD, grad_out_BSD;  // local tokens
  TokenShard tokens;
  // x and the weights by name: the leaves whose gradients a backward pass leaves.
  std::vector<std::pair<std::string, Tensor>> leaves() const;
};
RankLayer rank_layer(const LayerCase& layer, bool requires_grad, const Communicator& comm);

}  // namespace parlat
