#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/comm/communicator.h"
#include "parlat/kernels/decode_attention.h"

namespace parlat {

// Attention of one step over a rank's part of the cache, for the rank's own heads: q_nhd [n, h, w + R] (absorbed,
// scaled) -> [n, h, w].

// Members split the heads (mla, gla, tpla): the rank's cache has every token. Nothing is sent.
Tensor attend_all_tokens(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope);

// Members split the tokens (dcp, tpla-dcp): queries of all heads are gathered, each member attends to its own tokens,
// heads are scattered and the members' partial results merged. n_heads: of all members together.
//   sent    a rank: n h (w + R) (M-1) gathered, n (H - h) (w + 1) scattered
//   source  docs/mathematics.md sections 7 and 8
Tensor attend_own_tokens(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope, int64_t n_heads,
                         Communicator& members);

}  // namespace parlat
