#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// Latent all-gather attention (LAGA): queries change hands, keys and values do not. Every rank gathers the latent of
// the whole sequence and rebuilds keys and values for its own heads only.
//
//   steps   one gather (issued before the query projection, awaited after it) and two all-to-alls
//   sent    a rank: H (N + R + V) B S/P (P-1)/P  +  (L + R) B S/P (P-1)  elements
//   saved   q [B,S,H/P,N+R], latent [B,S,L+R], out [B,S/P,H,V]; fused also out [B,S,H/P,V] and lse [B,S,H/P]; eager, or
//           to save all, k and v [B,S,H/P,N+R and V]; eager also probabilities [B,H/P,S,S]
//   source  arXiv 2607.17644, Algorithm 1
class LagaAttention final : public Attention {
 public:
  LagaAttention(Communicator& comm, AttentionOptions options) : comm_(comm), options_(options) {}

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Communicator& comm_;
  AttentionOptions options_;
};

}  // namespace parlat
