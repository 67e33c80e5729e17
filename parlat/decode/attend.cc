#include "parlat/decode/attend.h"

#include <ATen/ATen.h>

#include "parlat/comm/shards.h"
#include "parlat/mla/merge.h"

namespace parlat {

Tensor attend_all_tokens(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope) {
  return decode_attention(q_nhd, cache, d_rope).out_nhw;
}

Tensor attend_own_tokens(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope, int64_t n_heads,
                         Communicator& members) {
  const int64_t n = q_nhd.size(0), d = q_nhd.size(2), width = d - d_rope;
  const HeadShards heads(n_heads, members.size());
  std::vector<Tensor> queries;
  for (int m = 0; m < members.size(); ++m) queries.push_back(at::empty({n, heads.range(m).size(), d}, at::kFloat));
  members.all_gather(q_nhd.contiguous(), queries, "decode queries").wait();
  const PartialAttention partial = decode_attention(at::cat(queries, 1), cache, d_rope);

  // A member's partial results with their lse as one more column.
  const Tensor with_lse = at::cat({partial.out_nhw, partial.lse_nh.unsqueeze(-1)}, 2);
  std::vector<Tensor> send, receive;
  for (int m = 0; m < members.size(); ++m) {
    const Range theirs = heads.range(m);
    send.push_back(with_lse.narrow(1, theirs.begin, theirs.size()).contiguous());
    receive.push_back(at::empty({n, heads.range(members.rank()).size(), width + 1}, at::kFloat));
  }
  members.all_to_all(send, receive, "decode partial results").wait();

  std::vector<PartialOut> parts;
  for (const Tensor& part : receive) parts.push_back({part.narrow(2, 0, width), part.select(2, width)});
  return merge(parts).out;
}

}  // namespace parlat
