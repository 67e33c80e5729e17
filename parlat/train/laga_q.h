#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// LAGA that gathers the query latent, too, instead of exchanging queries: Q columns for all heads together are fewer
// than N + R of each. Every rank then computes the queries of its own heads for the whole sequence. Only for models
// with a query latent.
//
//   steps   two gathers (latents, then query latents; the first is awaited after queries are computed), one all-to-all
//   sent    a rank: H V B S/P (P-1)/P  +  (L + R + Q) B S/P (P-1)  elements
//   saved   what LAGA saves, and c_q [B,S,Q] of the whole sequence
//   source  arXiv 2607.17644, section 7 (an extension it leaves open)
class LagaQAttention final : public Attention {
 public:
  LagaQAttention(Communicator& comm, AttentionOptions options) : comm_(comm), options_(options) {}

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Communicator& comm_;
  AttentionOptions options_;
};

}  // namespace parlat
