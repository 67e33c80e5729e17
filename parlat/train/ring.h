#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// Queries, keys and values stay; latents travel. Every rank attends with all heads of its own tokens to the latents of
// one rank after the other as they pass by, each joining what was summed before. The next latents are under way while
// these are used. Backward they pass by again, and the gradient of each follows it around in fp32. Any number of ranks;
// with zigzag sharding all have the same work under a causal mask. Only with the fused kernel.
//
//   steps   P - 1 exchanges with both neighbours; backward 2 (P - 1)
//   sent    a rank: (L + R) B S/P (P-1)  elements; backward the same, and as many in fp32
//   cost    every rank rebuilds keys and values of all heads for the whole sequence: P times LAGA's up-projection
//   saved   q [B,S/P,H,N+R], latent [B,S/P,L+R], out [B,S/P,H,V], lse [B,S/P,H]
//   source  Ring Attention (arXiv 2310.01889), with latents
class RingAttention final : public Attention {
 public:
  RingAttention(Communicator& comm, AttentionOptions options) : comm_(comm), options_(options) {}

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Communicator& comm_;
  AttentionOptions options_;
};

}  // namespace parlat
