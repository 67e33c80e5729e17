#include "parlat/plan/form_costs.h"

#include <algorithm>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/base/range.h"

namespace parlat {

namespace {

constexpr int64_t kFp32Bytes = 4;

// Token and head counts that every closed form is made of: `local` tokens here, `heads` heads here.
struct Split {
  explicit Split(const AttentionShape& shape)
      : all_tokens(std::accumulate(shape.tokens.begin(), shape.tokens.end(), int64_t{0})),
        local(shape.tokens[shape.rank]),
        heads(even_share(shape.dims.n_heads, shape.ranks(), shape.rank).size()),
        all_heads(shape.dims.n_heads) {}
  int64_t all_tokens, local, heads, all_heads;

  // Elements one rank sends when a tensor of `width` columns a head goes from token shards to head shards, and back.
  int64_t scatter_heads(int64_t width) const { return local * (all_heads - heads) * width; }
  int64_t scatter_sequence(int64_t width) const { return heads * (all_tokens - local) * width; }
};

// q, k, v change hands on the way in, out on the way back: `width_in` columns a head in, `width_out` out.
void exchange_heads(const Split& split, int64_t width_in, int64_t width_out, int64_t element_bytes, FormCosts& costs) {
  const int64_t forward = split.scatter_heads(width_in) + split.scatter_sequence(width_out);
  costs.forward.all_to_all = forward * element_bytes;
  costs.backward.all_to_all = (split.scatter_sequence(width_in) + split.scatter_heads(width_out)) * element_bytes;
  costs.paper_bytes += forward * 4;
}

// `width` columns a token are gathered; their gradient is reduce-scattered.
void gather(const AttentionShape& shape, const Split& split, int64_t width, FormCosts& costs) {
  costs.forward.all_gather = (shape.ranks() - 1) * split.local * width * shape.element_bytes;
  costs.backward.reduce_scatter = (split.all_tokens - split.local) * width * shape.element_bytes;
  if (shape.ranks() > 1) costs.paper_bytes += split.local * width * 2;
}

// What the fused kernel saves of its own output: where heads are exchanged, beside the output that comes back.
int64_t fused_out(const AttentionShape& shape, const Split& split) {
  const bool again = shape.attention.kernel == AttentionKernel::kFused && shape.ranks() > 1;
  return again ? split.all_tokens * split.heads * shape.dims.d_v : 0;
}

// Saved elements that attention over explicit keys and values needs: q, k, v of this rank's heads.
int64_t explicit_elements(const AttentionShape& shape, const Split& split) {
  const MlaDims& d = shape.dims;
  return split.all_tokens * split.heads * (2 * d.d_qk() + d.d_v) + fused_out(shape, split);
}

// The same where keys and values come from the latent of the whole sequence.
int64_t latent_elements(const AttentionShape& shape, const Split& split) {
  const MlaDims& d = shape.dims;
  const int64_t latent = split.all_tokens * d.d_cache();
  if (!shape.attention.rebuilds_keys()) return latent + explicit_elements(shape, split);
  return latent + split.all_tokens * split.heads * d.d_qk() + fused_out(shape, split);
}

// The same in latent space: q, q_absorbed, out_latent.
int64_t absorbed_elements(const MlaDims& d, const Split& split) {
  return split.all_tokens * (d.d_cache() + split.heads * (d.d_qk() + d.d_cache() + d.d_latent));
}

// Saved around the attention by projections and norms, and what its kernel keeps of the scores of `queries` tokens and
// `heads` heads; `elements` is what differs by form.
void save(const AttentionShape& shape, const Split& split, int64_t queries, int64_t heads, int64_t elements,
          FormCosts& costs) {
  const MlaDims& d = shape.dims;
  const bool eager = shape.attention.kernel == AttentionKernel::kEager;
  const int64_t scores = eager ? heads * queries * (split.all_tokens / shape.batch) : 0,
                lse = eager ? 0 : queries * heads;
  const int64_t around = split.local * (d.d_q_latent.value_or(0) + d.d_cache() + split.all_heads * d.d_v);
  const int64_t inverse_rms = split.local * (d.d_q_latent ? 2 : 1);
  costs.saved_bytes = (scores + around + elements) * shape.element_bytes +
                      (inverse_rms + lse) * std::max<int64_t>(shape.element_bytes, kFp32Bytes);
}

// A group of consecutive ranks as if it were all.
AttentionShape group_of(const AttentionShape& shape, int64_t n_groups) {
  const int64_t size = shape.ranks() / n_groups, first = shape.rank / size * size;
  AttentionShape group = shape;
  group.tokens.assign(shape.tokens.begin() + first, shape.tokens.begin() + first + size);
  group.rank = static_cast<int>(shape.rank - first);
  return group;
}

// Every group's latents pass by as shards, but for those that come last, and are gathered within the group; backward
// again, and their gradients in fp32 (fp64).
void pass_latents(const AttentionShape& shape, int64_t n_groups, FormCosts& costs) {
  const int64_t ranks = shape.ranks(), size = ranks / n_groups, width = shape.dims.d_cache();
  const int64_t bytes = shape.element_bytes, wide_bytes = std::max<int64_t>(bytes, kFp32Bytes);
  const auto held = [&](int64_t hop) { return shape.tokens[(shape.rank - hop * size + ranks) % ranks] * width; };
  for (int64_t hop = 0; hop + 1 < n_groups; ++hop) {
    costs.forward.send_recv += held(hop) * bytes;
    costs.backward.send_recv += held(hop) * bytes + held(hop + 1) * wide_bytes;
  }
  int64_t gathered = 0;
  for (int64_t hop = 0; hop < n_groups; ++hop) gathered += held(hop);
  costs.forward.all_gather = costs.backward.all_gather = (size - 1) * gathered * bytes;
  costs.backward.reduce_scatter = (Split(shape).all_tokens * width - gathered) * wide_bytes;
  if (size > 1) costs.paper_bytes += gathered * 2;
}

}  // namespace

nlohmann::json to_json(const SentBytes& sent) {
  return {{"all_to_all", sent.all_to_all}, {"all_gather", sent.all_gather}, {"reduce_scatter", sent.reduce_scatter},
          {"all_reduce", sent.all_reduce}, {"send_recv", sent.send_recv},   {"total", sent.total()}};
}

FormCosts form_costs(TrainForm form, const AttentionShape& shape) {
  const MlaDims& d = shape.dims;
  PARLAT_ASSERT(0 <= shape.rank && shape.rank < shape.ranks() && shape.batch > 0, "rank {} of {}, batch {}", shape.rank,
                shape.ranks(), shape.batch);
  const Split split(shape);
  FormCosts costs;
  switch (form) {
    case TrainForm::kExplicit:
      exchange_heads(split, 2 * d.d_qk() + d.d_v, d.d_v, shape.element_bytes, costs);
      save(shape, split, split.all_tokens, split.heads, split.local * d.d_cache() + explicit_elements(shape, split),
           costs);
      return costs;
    case TrainForm::kAbsorbed:
      exchange_heads(split, d.d_qk(), d.d_v, shape.element_bytes, costs);
      gather(shape, split, d.d_cache(), costs);
      save(shape, split, split.all_tokens, split.heads, absorbed_elements(d, split), costs);
      return costs;
    case TrainForm::kLaga:
      exchange_heads(split, d.d_qk(), d.d_v, shape.element_bytes, costs);
      gather(shape, split, d.d_cache(), costs);
      save(shape, split, split.all_tokens, split.heads, latent_elements(shape, split), costs);
      return costs;
    case TrainForm::kLagaQ: {
      const int64_t d_q_latent = d.d_q_latent.value();
      exchange_heads(split, 0, d.d_v, shape.element_bytes, costs);
      gather(shape, split, d.d_cache() + d_q_latent, costs);
      save(shape, split, split.all_tokens, split.heads, split.all_tokens * d_q_latent + latent_elements(shape, split),
           costs);
      costs.saved_bytes += split.all_tokens * d.d_rope * std::max<int64_t>(shape.element_bytes, kFp32Bytes);
      return costs;
    }
    case TrainForm::kRing:
    case TrainForm::kHybrid: {
      const int64_t n_groups = ring_groups(form, shape.ranks(), d.n_heads, shape.attention);
      const AttentionShape group = group_of(shape, n_groups);
      const Split in_group(group);
      exchange_heads(in_group, d.d_qk(), d.d_v, shape.element_bytes, costs);
      pass_latents(shape, n_groups, costs);
      save(group, in_group, in_group.all_tokens, in_group.heads,
           split.local * d.d_cache() + in_group.all_tokens * in_group.heads * d.d_qk() + fused_out(group, in_group),
           costs);
      return costs;
    }
  }
  throw InternalError(fmt::format("form {} has no cost function in plan/", static_cast<int>(form)));
}

}  // namespace parlat
