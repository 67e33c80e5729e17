#pragma once

#include "parlat/plan/train_plan.h"

namespace parlat {

// Fills in what a form takes: FLOPs, compute_s, exchange_s, hidden_s, steps, between_bytes. The costs of the form (rank
// 0) must be there. Products run at gemm's rate for their smallest dimension or at memory's, whichever is slower;
// attention at its kernel's rate or, where a head is too wide for it, as products over all S x S scores, which pass
// through memory 4 times forward and 7 backward. Forward, what is saved is written and read once, and what is sent read
// and written at both ends (packed and unpacked); backward is counted as twice that, whatever it sends. An exchange
// takes its latency and the bytes of the slower of both links. What is hidden (docs/plan.md):
//   absorbed, laga, laga-q  the gather of latents behind the query's projection, forward (not that of queries' latents)
//   ring, hybrid            each hop behind the attention over the latents that are there meanwhile; backward the
//                           gradients' hop behind what the latents' leaves of it, the last behind nothing
void estimate_time(const Machine& machine, const TrainPlanOptions& options, FormPlan& plan);

// How a form splits `ranks` ranks: groups between which latents travel (1 where they do not), and the ranks of each,
// which split the heads.
struct RankGroups {
  int64_t groups = 1, members = 1;
};
RankGroups rank_groups(const FormPlan& plan, const TrainPlanOptions& options);

}  // namespace parlat
