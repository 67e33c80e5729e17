#include "parlat/train/ring.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

#include "parlat/base/error.h"
#include "parlat/comm/differentiable.h"
#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/fused_passes.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/mla/projections.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

// Ranks as groups of consecutive ones, which stand in a ring. Graphs keep it alive.
struct RankRing {
  RankRing(Communicator& comm, int64_t n_groups) {
    PARLAT_ASSERT(n_groups > 0 && comm.size() % n_groups == 0, "{} groups of {} ranks", n_groups, comm.size());
    const int size = static_cast<int>(comm.size() / n_groups);
    group = comm.split(comm.rank() / size);
    ring = comm.split(comm.rank() % size);
  }
  std::unique_ptr<Communicator> group;  // the ranks of this rank's group
  std::unique_ptr<Communicator> ring;   // this rank's place in every group, in the order of groups
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Which of group `owner`'s tokens the tokens of group `group` see. Both lie in increasing order, so that what a query
// sees of the owner's is one interval, too.
KeyRanges visible_part(const KeyRanges& visible, const SequenceShards& groups, int group, int owner) {
  std::vector<Range> rows;
  for (int64_t b = 0; b < visible.batch(); ++b) {
    for (const Range& run : groups.runs(group)) {
      for (int64_t s = run.begin; s < run.end; ++s) {
        const Range& seen = visible.row(b, s);
        rows.push_back({groups.count_before(owner, seen.begin), groups.count_before(owner, seen.end)});
      }
    }
  }
  return {visible.batch(), groups.count(group), groups.count(owner), std::move(rows)};
}

// What a rank does hop by hop. At hop k the group holds the latents of group `group - k`.
struct Passing final : torch::CustomClassHolder {
  Passing(std::shared_ptr<RankRing> of_ranks, const MlaSpec& spec, const TokenShard& tokens)
      : ranks(std::move(of_ranks)),
        scale(spec.softmax_scale()),
        d_nope(spec.dims.d_nope),
        heads(spec.dims.n_heads, ranks->group->size()) {
    const int size = ranks->group->size();
    const SequenceShards groups = tokens.shards.grouped(size);
    for (int hop = 0; hop < hops(); ++hop) {
      visible.push_back(visible_part(tokens.visible, groups, owner(0), owner(hop)));
      shares.push_back(tokens.shards.within_group(size, owner(hop)));
    }
  }
  int hops() const { return ranks->ring->size(); }
  int owner(int hop) const { return (ranks->ring->rank() - hop + hops()) % hops(); }

  // Passes `send` on and receives what the neighbour held, as large as what this rank holds at `hop`.
  Handle pass_on(const Tensor& send, Tensor& receive, int hop, const char* what) const {
    const int64_t count = shares[hop % hops()].count(ranks->group->rank());
    receive = metered("latents in passing", at::empty({send.size(0), count, send.size(2)}, send.options()));
    return ranks->ring->send_recv(send, owner(hops() - 1), receive, owner(1), what);
  }

  // The latents of the whole group of which this rank holds `shard`.
  Tensor gather(const Tensor& shard_BSd, int hop) const {
    return gather_sequence_async(shard_BSd, shares[hop], *ranks->group, "group latent").wait();
  }

  const std::shared_ptr<RankRing> ranks;
  const double scale;
  const int64_t d_nope;
  const HeadShards heads;
  std::vector<KeyRanges> visible;      // by hop
  std::vector<SequenceShards> shares;  // by hop: who of the group holds which of the latents
};

// Calls body(hop, latents) for every group's latents, the next being under way meanwhile.
template <typename Body>
void for_each_hop(const Passing& passing, const Tensor& latent_local_BSd, const char* what, const Body& body) {
  Tensor shard = latent_local_BSd.contiguous();
  for (int hop = 0; hop < passing.hops(); ++hop) {
    Tensor next;
    Handle exchange;
    if (hop + 1 < passing.hops()) exchange = passing.pass_on(shard, next, hop + 1, what);
    body(hop, passing.gather(shard, hop));
    exchange.wait();
    shard = next;
  }
}

// The gradients of latents, each following its latents from group to group and arriving at their owner with the last
// hop: what each group finds is added in the order in which they pass.
class TravellingGradient {
 public:
  explicit TravellingGradient(const Passing& passing) : passing_(passing) {}
  // `found`: the gradient of the latents held at this hop, from this group's queries.
  void add(int hop, const Tensor& found_BSd) {
    if (hop == 0) {
      own_ = found_BSd;
      return;
    }
    if (hop > 1) {
      exchange_.wait();
      found_BSd.add_(arriving_);
    }
    exchange_ = passing_.pass_on(found_BSd, arriving_, hop + 1, "ring latent gradient");
  }
  Tensor of_own_latents() {
    if (passing_.hops() > 1) {
      exchange_.wait();
      own_.add_(arriving_);
    }
    return own_;
  }

 private:
  const Passing& passing_;
  Tensor own_, arriving_;
  Handle exchange_;
};

class RingFunction : public torch::autograd::Function<RingFunction> {
 public:
  // q: the group's queries of this rank's heads; w_ukv: the rows of these.
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& latent, const Tensor& w_ukv,
                        const c10::intrusive_ptr<Passing>& passing) {
    const int64_t n_heads = q.size(2), d_v = w_ukv.size(0) / n_heads - passing->d_nope;
    const Tensor sum = metered("out", at::empty({q.size(0), q.size(1), n_heads, d_v}, compute_options(q)));
    const Tensor lse = metered("lse", at::empty({q.size(0), q.size(1), n_heads}, compute_options(q)));
    for_each_hop(*passing, latent, "ring latent", [&](int hop, const Tensor& here) {
      const LatentKeys keys(here, w_ukv, n_heads, passing->d_nope);
      fused_forward({q, passing->visible[hop], passing->scale}, keys, sum, lse, /*resume=*/hop > 0);
    });
    const Tensor out = metered("out", sum.to(q.scalar_type()));
    ctx->save_for_backward({latent, w_ukv, lse});
    save_apart(ctx, "q", q);
    save_apart(ctx, "out", out);
    ctx->saved_data["passing"] = c10::IValue::make_capsule(passing);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    refuse_second_gradients("ring attention");
    const auto saved = ctx->get_saved_variables();
    const Tensor &latent = saved[0], &w_ukv = saved[1], &grad_out = grad[0];
    Tensor q = take(ctx, "q");
    const auto passing = c10::static_intrusive_pointer_cast<Passing>(ctx->saved_data["passing"].toCapsule());
    const Tensor along = out_along_gradient(take(ctx, "out"), grad_out);
    QueryGradient grad_q = QueryGradient::zeros(q, passing->hops());
    WeightGradient grad_w(w_ukv, compute_dtype(w_ukv.scalar_type()));
    TravellingGradient travelling(*passing);
    for_each_hop(*passing, latent, "ring latent again", [&](int hop, const Tensor& here) {
      const Tensor grad_here = wide_zeros("latent gradient", here);
      const LatentKeys keys(here, w_ukv, q.size(2), passing->d_nope, grad_here, grad_w.place());
      fused_backward({q, passing->visible[hop], passing->scale}, keys, along, saved[2], grad_out, grad_q,
                     /*parts=*/passing->hops() > 1);
      travelling.add(hop,
                     sum_to_shard(grad_here, passing->shares[hop], *passing->ranks->group, "group latent gradient"));
    });
    q.reset();
    return {std::move(grad_q).finish(latent.scalar_type()),
            travelling.of_own_latents().to(latent.scalar_type()),
            grad_w.finish(),
            {}};
  }
};

}  // namespace

RingAttention::RingAttention(Communicator& comm, int64_t n_groups)
    : ranks_(std::make_shared<RankRing>(comm, n_groups)) {}

Tensor RingAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), w.dims().d_model}, "x");
  const auto passing = c10::make_intrusive<Passing>(ranks_, w.spec, tokens);
  Communicator& group = *ranks_->group;
  const Tensor latent_BSd = project_latent(w, x_BSD, tokens.rope);
  const Tensor q_BSHd = scatter_heads_gather_sequence(project_query(w, x_BSD, tokens.rope), passing->heads,
                                                      passing->shares[0], group, "group query");
  const Tensor w_ukv = up_projection(w, passing->heads.range(group.rank()));
  const Tensor out_BSHV = RingFunction::apply(q_BSHd, latent_BSd, w_ukv, passing);
  return project_output(
      w, scatter_sequence_gather_heads(out_BSHV, passing->heads, passing->shares[0], group, "group out"));
}

}  // namespace parlat
