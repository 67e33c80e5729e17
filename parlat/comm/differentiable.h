#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "parlat/comm/communicator.h"
#include "parlat/comm/shards.h"

namespace parlat {

// Collectives that autograd differentiates. In the backward pass each becomes its adjoint: an all-to-all the inverse
// all-to-all, a gather a reduce-scatter that sums over ranks. The graphs of all ranks must be alike: the engine replays
// them in reverse order of creation.

// x_local [B, S_local, H, d] of this rank's tokens and all heads -> [B, S, H_local, d]: this rank's heads, whole
// sequence in global order. Sent: (H - H_local) of H heads of the local tokens. P = 1: x itself.
Tensor scatter_heads_gather_sequence(const Tensor& x_local_BSHd, const HeadShards& heads, const SequenceShards& tokens,
                                     Communicator& comm, const std::string& what);

// The inverse: [B, S, H_local, d] -> [B, S_local, H, d].
Tensor scatter_sequence_gather_heads(const Tensor& x_BSHd, const HeadShards& heads, const SequenceShards& tokens,
                                     Communicator& comm, const std::string& what);

// A gather whose exchange is under way: issued at construction, finished in wait(), so that other work overlaps it.
class PendingGather {
 public:
  PendingGather(const Tensor& x_local_BSd, const SequenceShards& tokens, Communicator& comm, std::string what);
  // [B, S, d] in global order, on the autograd graph. To be called once.
  Tensor wait();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

inline PendingGather gather_sequence_async(const Tensor& x_local_BSd, const SequenceShards& tokens, Communicator& comm,
                                           std::string what) {
  return PendingGather(x_local_BSd, tokens, comm, std::move(what));
}

// The gather's adjoint by itself, not differentiable: [B, S, d] of every rank -> this rank's tokens of their sum. Sent:
// the other ranks' tokens. P = 1: x itself.
Tensor sum_to_shard(const Tensor& x_BSd, const SequenceShards& tokens, Communicator& comm, const std::string& what);

// Rows of x [n, d] grouped by destination: send_counts[p] rows to rank p, in order; returns the received rows grouped
// by source, receive_counts[p] each. Backward: the inverse exchange. For expert dispatch and combine.
Tensor exchange_rows(const Tensor& x_nd, const std::vector<int64_t>& send_counts,
                     const std::vector<int64_t>& receive_counts, Communicator& comm, const std::string& what);

}  // namespace parlat
