#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// What today's stacks do (Megatron's MLA under Ulysses-style sequence parallelism): every rank rebuilds keys and values
// of all heads for its own tokens, with the rope key repeated for every head, and all of them change hands.
//
//   steps   four all-to-alls: q, k, v, out
//   sent    a rank: H (2 (N + R) + 2 V) B S/P (P-1)/P  elements
//   saved   q and k [B,S,H/P,N+R], v [B,S,H/P,V], latent [B,S/P,L+R], out [B,S/P,H,V]; eager also probabilities
//           [B,H/P,S,S], fused out [B,S,H/P,V] and lse [B,S,H/P]
//   source  arXiv 2607.17644, section 3.2 (B1); DeepSpeed-Ulysses (arXiv 2309.14509)
class ExplicitAttention final : public Attention {
 public:
  ExplicitAttention(Communicator& comm, AttentionOptions options) : comm_(comm), options_(options) {}

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Communicator& comm_;
  AttentionOptions options_;
};

}  // namespace parlat
