#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/config/parallel.h"

namespace parlat {

// One MLA layer on one rank of P. tokens[p]: local tokens of rank p (batch included), heads split evenly (HeadShards).
struct AttentionShape {
  MlaDims dims;
  int64_t batch = 1;
  std::vector<int64_t> tokens;  // B * S_local of every rank
  int rank = 0;
  int64_t element_bytes = 2;
  AttentionOptions attention = {};
  int ranks() const { return static_cast<int>(tokens.size()); }
};

// Payload bytes this rank sends to others, by collective (mla.md section 5).
struct SentBytes {
  int64_t all_to_all = 0, all_gather = 0, reduce_scatter = 0, all_reduce = 0, send_recv = 0;
  int64_t total() const { return all_to_all + all_gather + reduce_scatter + all_reduce + send_recv; }
};
// {"all_to_all": bytes, ..., "total": bytes}
nlohmann::json to_json(const SentBytes& sent);

// saved_bytes: every tensor that the forward pass of one layer leaves alive for its backward pass, beside the input x,
// the weights, the rope tables and the output. In all forms, with t local tokens, T tokens of the batch and h local
// heads:
//   query latent (if any) before its norm t Q, latent before its norm t (L+R), 1/rms of each norm t (fp32;
//   fp64 in fp64), out t H V
// and besides: explicit  latent t (L+R), q and k 2 T h (N+R), v T h V
//              laga      latent T (L+R), q and k 2 T h (N+R), v T h V
//              absorbed  latent T (L+R), q T h (N+R), q_absorbed T h (L+R), out_latent T h L
//              laga-q    what laga saves, c_q after its norm of all tokens, T Q, and their rope table, T R
//                        in fp32 (fp64 in fp64)
//              ring      latent t (L+R), q t H (N+R)
//              hybrid    latent t (L+R), q T h (N+R), T and h being those of the group (ring: a group of one rank)
// by kernel:   eager     probabilities h S T
//              fused     lse T h in fp32 (fp64 in fp64) and, where heads are exchanged, out T h V (not absorbed); with
//                        only the latent saved, no k and v (laga, laga-q)
struct FormCosts {
  SentBytes forward;
  SentBytes backward;       // without the gradient reduction of replicated weights
  int64_t paper_bytes = 0;  // forward, LAGA's counting; independent of element_bytes
  int64_t saved_bytes = 0;
};

// The cost function of each form, exact for every rank, split and dtype. InternalError for a form without one.
FormCosts form_costs(TrainForm form, const AttentionShape& shape);

}  // namespace parlat
