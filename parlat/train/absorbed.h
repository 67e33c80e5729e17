#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// Absorbed attention under sequence parallelism: the exchange of LAGA, but attention happens in latent space. Queries
// are absorbed after they changed hands and outputs un-absorbed before they return, so what travels stays N + R and V
// wide; what is kept for the backward pass is L wide a head, which is the memory trap of the paper.
//
//   steps   one gather (issued before the query projection, awaited after it) and two all-to-alls
//   sent    a rank: H (N + R + V) B S/P (P-1)/P  +  (L + R) B S/P (P-1)  elements
//   saved   q [B,S,H/P,N+R], q_absorbed [B,S,H/P,L+R], latent [B,S,L+R], out_latent [B,S,H/P,L], out [B,S/P,H,V];
//           eager also probabilities [B,H/P,S,S], fused lse [B,S,H/P]
//   source  arXiv 2607.17644, section 3.2 (B2)
class AbsorbedAttention final : public Attention {
 public:
  AbsorbedAttention(Communicator& comm, AttentionOptions options) : comm_(comm), options_(options) {}

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Communicator& comm_;
  AttentionOptions options_;
};

}  // namespace parlat
