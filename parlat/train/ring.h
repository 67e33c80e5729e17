#pragma once

#include <memory>

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

struct RankRing;

// Forms ring and hybrid: latents travel. Of G groups of A consecutive ranks each attends with its own tokens to the
// latents of one group after the other as they pass by, each joining what was summed before. Within a group heads are
// split as in LAGA: queries change hands, and each hop its ranks gather the latents of which each received a shard. So
// only shards travel between groups. The next hop is under way while the latents of this one are used. Backward they
// pass by again, and their gradient, summed within the group, follows a hop behind, in fp32 (fp64). Only with the fused
// kernel.
//
// ring: A = 1, any number of ranks, no head is split. hybrid: A <= H; keys and values of a head are rebuilt G times
// instead of P. With zigzag sharding all ranks have the same work under a causal mask.
//
//   steps   2 all-to-alls and G gathers within the group, G - 1 exchanges with both neighbouring groups; backward also
//   G
//           reduce-scatters, and the exchanges twice
//   sent    a rank: H (N + R + V) B S/P (A-1)/A  +  (L + R) B S/P (P-1)  elements, of which (L + R) B S/P (G-1) to the
//           next group; backward the same, and as many of latents' gradients in fp32
//   saved   q [B,S/G,H/A,N+R], latent [B,S/P,L+R], out [B,S/P,H,V], lse [B,S/G,H/A]; A > 1: also out [B,S/G,H/A,V]
//   source  Ring Attention (arXiv 2310.01889), USP (arXiv 2405.07719), with latents
class RingAttention final : public Attention {
 public:
  // Collective. n_groups divides comm.size().
  RingAttention(Communicator& comm, int64_t n_groups);

  // x_BSD: this rank's tokens [B, S/P, D]. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  std::shared_ptr<RankRing> ranks_;
};

}  // namespace parlat
