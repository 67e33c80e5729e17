#include "parlat/plan/form_time.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "parlat/base/range.h"

namespace parlat {

namespace {

constexpr double kPackings = 4;  // what is sent is read, written, and both again where it arrives
// Of scores that are written out: scores written and read, probabilities written and read; backward their gradient
// written, it and they read, the scores' gradient written and read for both q and k, the probabilities read for v.
constexpr double kForwardPasses = 4, kBackwardPasses = 7;
// Besides, of scores that are the sum of two products: the second written, both read, the sum written; backward the
// scores' gradient read for q and k of the second as well.
constexpr double kForwardPassesOfSum = 4, kBackwardPassesOfSum = 2;

// Multiply-adds counted as two; of attention over visible pairs, whatever else the kernel computes.
struct Work {
  double seconds = 0, flops = 0;
};
Work operator+(const Work& a, const Work& b) { return {a.seconds + b.seconds, a.flops + b.flops}; }
Work operator*(double times, const Work& work) { return {times * work.seconds, times * work.flops}; }

// Time and FLOPs of the pieces that forms are made of, on one rank.
class Pieces {
 public:
  Pieces(const Machine& machine, const TrainPlanOptions& options)
      : machine_(machine),
        gemm_(machine.gemm_in(options.dtype)),
        attention_(machine.attention_in(options.dtype)),
        options_(options),
        element_bytes_(static_cast<double>(dtype_bytes(options.dtype))),
        ranks_per_node_(options.ranks / options.nodes),
        sharing_(
            std::max(1.0, static_cast<double>(ranks_per_node_) / static_cast<double>(machine.ranks_at_full_rate))) {}

  // `times` products [m, k] [k, n].
  Work gemm(int64_t m, int64_t n, int64_t k, int64_t times = 1) const {
    const auto a = static_cast<double>(m), b = static_cast<double>(n), c = static_cast<double>(k);
    if (m == 0) return {};
    const double flops = 2 * a * b * c, computed = flops / gemm_.at(std::min({a, b, c}));
    const double moved = element_bytes_ * (a * b + b * c + a * c) / machine_.memory_bytes_per_s;
    return static_cast<double>(times) * Work{sharing_ * std::max(computed, moved), flops};
  }

  double overhead() const { return sharing_ * machine_.layer_overhead_s; }
  double memory(double bytes) const { return sharing_ * bytes / machine_.memory_bytes_per_s; }

  // Forward and backward, `head_pairs` being visible pairs times heads. Backward the fused kernel makes scores again.
  std::array<Work, 2> attention(double head_pairs, int64_t d_qk, int64_t d_v, bool sum_of_products) const {
    const auto qk = static_cast<double>(d_qk), v = static_cast<double>(d_v);
    const bool too_wide = attention_.widest_fused && d_qk > *attention_.widest_fused;
    const bool eager = options_.attention.kernel == AttentionKernel::kEager;
    const double forward = head_pairs * 2 * (qk + v),
                 backward = head_pairs * (eager ? 4 * (qk + v) : 2 * (3 * qk + 2 * v));
    if (too_wide || (eager && !attention_.eager)) {
      const auto written = written_attention(2 * head_pairs, qk, v, eager && sum_of_products);
      return {Work{written[0], forward}, Work{written[1], backward}};
    }
    const KernelRate& rate = eager ? *attention_.eager : attention_.fused;
    return {Work{sharing_ * forward / rate.forward, forward}, Work{sharing_ * backward / rate.backward, backward}};
  }

  // Seconds of `head_scores` scores, visible or not.
  std::array<double, 2> written_attention(double head_scores, double d_qk, double d_v, bool sum_of_products) const {
    const auto tokens = static_cast<double>(options_.sequence);
    const double products =
        sharing_ * 2 * head_scores * (d_qk / gemm_.at(std::min(tokens, d_qk)) + d_v / gemm_.at(std::min(tokens, d_v)));
    const double pass = memory(head_scores * element_bytes_);
    const double forward = products + (kForwardPasses + (sum_of_products ? kForwardPassesOfSum : 0)) * pass,
                 backward = 2 * products + (kBackwardPasses + (sum_of_products ? kBackwardPassesOfSum : 0)) * pass;
    return {forward / attention_.written_share, backward / attention_.written_share};
  }

  // Of what one of `members` consecutive ranks sends to the others alike, the share for other nodes.
  double share_between(int64_t members) const {
    if (members <= ranks_per_node_) return 0;
    return static_cast<double>(members - ranks_per_node_) / static_cast<double>(members - 1);
  }
  // Of a shard gathered by all members.
  double gather_share(int64_t members) const {
    if (!machine_.hierarchical_gather || members <= ranks_per_node_) return share_between(members);
    const int64_t nodes = (members + ranks_per_node_ - 1) / ranks_per_node_;
    return static_cast<double>(nodes - 1) / static_cast<double>(members - 1);
  }
  double exchange(double bytes, double share_between) const {
    if (bytes == 0) return 0;
    const double within =
        machine_.within.latency_s + sharing_ * bytes * (1 - share_between) / machine_.within.bytes_per_s;
    if (share_between == 0) return within;
    const Link& link = machine_.between_nodes();
    return std::max(within, link.latency_s + bytes * share_between / link.bytes_per_s);
  }
  // Hops wait for the slowest of all ranks, which sends to another node if there is one.
  double hop_share() const { return options_.nodes > 1 ? 1 : 0; }

  double overlap(double exchange_s, double compute_s) const {
    return machine_.overlap * std::min(exchange_s, compute_s);
  }

 private:
  const Machine& machine_;
  const RateCurve& gemm_;
  const AttentionRates& attention_;
  const TrainPlanOptions& options_;
  const double element_bytes_;
  const int64_t ranks_per_node_;
  const double sharing_;  // of one rank's rates by ranks beyond what the node has
};

struct Estimate {
  Estimate(const Machine& machine, const TrainPlanOptions& options, FormPlan& plan)
      : options(options),
        d(options.dims),
        plan(plan),
        groups(rank_groups(plan, options)),
        pieces(machine, options),
        local(options.batch * even_share(options.sequence, options.ranks, 0).size()),
        of_group(std::min(local * groups.members, options.batch * options.sequence)),
        heads(even_share(d.n_heads, groups.members, 0).size()) {}

  const TrainPlanOptions& options;
  const MlaDims& d;
  FormPlan& plan;
  const RankGroups groups;
  const Pieces pieces;
  const int64_t local, of_group, heads;  // tokens of this rank and of its group, heads of this rank

  // Visible pairs of the rank that has most.
  double pairs() const {
    const auto length = static_cast<double>(options.sequence), batch = static_cast<double>(options.batch);
    const double all = length * (length + 1) / 2;
    if (groups.groups == 1) return batch * all;
    const double share = static_cast<double>(of_group) / batch;
    return batch * (options.sharding == Sharding::kZigzag ? all / static_cast<double>(groups.groups)
                                                          : share * (length - share) + share * (share + 1) / 2);
  }

  Work query_projection() const {
    if (!d.d_q_latent) return pieces.gemm(local, d.n_heads * d.d_qk(), d.d_model);
    const Work down = pieces.gemm(local, *d.d_q_latent, d.d_model);
    if (plan.form == TrainForm::kLagaQ) return down + pieces.gemm(of_group, heads * d.d_qk(), *d.d_q_latent);
    return down + pieces.gemm(local, d.n_heads * d.d_qk(), *d.d_q_latent);
  }

  Work other_projections() const {
    const Work mlp = options.mlp_width > 0 ? 3 * pieces.gemm(local, options.mlp_width, d.d_model) : Work{};
    return pieces.gemm(local, d.d_cache(), d.d_model) + pieces.gemm(local, d.d_model, d.n_heads * d.d_v) + mlp;
  }

  // From latents to keys and values or, absorbed, from queries to latents and back.
  Work up_projection() const {
    if (plan.form == TrainForm::kExplicit) return pieces.gemm(local, d.n_heads * (d.d_nope + d.d_v), d.d_latent);
    if (plan.form == TrainForm::kAbsorbed) {
      return pieces.gemm(of_group, d.d_latent, d.d_nope, heads) + pieces.gemm(of_group, d.d_v, d.d_latent, heads);
    }
    return static_cast<double>(groups.groups) * pieces.gemm(of_group, d.d_nope + d.d_v, d.d_latent, heads);
  }
  std::array<Work, 2> attention() const {
    const bool absorbed = plan.form == TrainForm::kAbsorbed;
    return pieces.attention(pairs() * static_cast<double>(heads), absorbed ? d.d_cache() : d.d_qk(),
                            absorbed ? d.d_latent : d.d_v, absorbed && options.as_published);
  }

  // Saved tensors but for probabilities, whose passes are in the kernel's rate.
  double moved_bytes() const {
    const double scores = plan.attention.kernel == AttentionKernel::kEager
                              ? static_cast<double>(heads * options.batch * options.sequence * options.sequence)
                              : 0;
    return static_cast<double>(plan.costs.saved_bytes) - scores * static_cast<double>(dtype_bytes(options.dtype));
  }

  void wait(double seconds, double behind_s, int64_t times = 1) {
    if (seconds == 0) return;
    const double hidden = pieces.overlap(seconds, behind_s);
    plan.exchange_s += static_cast<double>(times) * (seconds - hidden);
    plan.hidden_s += static_cast<double>(times) * hidden;
    plan.steps += times;
  }

  // The hops of one pass, `hop_s` being what is computed in each. Backward, beside the latents, which are those of the
  // forward pass, their gradients travel: behind what the latents leave of a hop, and at last home, behind nothing.
  void pass(int64_t bytes, double hop_s) {
    const int64_t hops = groups.groups - 1, latents = plan.costs.forward.send_recv, gradients = bytes - latents;
    if (hops == 0) return;
    const auto hop = [&](int64_t of_all) {
      return pieces.exchange(static_cast<double>(of_all) / static_cast<double>(hops), pieces.hop_share());
    };
    wait(hop(latents), hop_s, hops);
    if (gradients == 0) return;
    wait(hop(gradients), std::max(0.0, hop_s - hop(latents)), hops - 1);
    wait(hop(gradients), 0);
  }

  // The exchanges of one pass; `gather_behind_s` and `hops_behind_s` are what is computed meanwhile. Groups gather once
  // a hop, which nothing hides.
  void exchange(const SentBytes& sent, double gather_behind_s, double hops_behind_s) {
    const double share = pieces.share_between(groups.members), gather_share = pieces.gather_share(groups.members);
    const auto each = [](int64_t bytes, int64_t parts) {
      return static_cast<double>(bytes) / static_cast<double>(parts);
    };
    const int64_t ways = plan.form == TrainForm::kExplicit ? 4  // queries, keys and values in, what comes out
                         : plan.form == TrainForm::kLagaQ  ? 1  // no queries
                                                           : 2;
    wait(pieces.exchange(each(sent.all_to_all, ways), share), 0, ways);
    // laga-q gathers the latents of queries too, by themselves: what is computed meanwhile waits for them.
    const auto d_q_latent = static_cast<double>(plan.form == TrainForm::kLagaQ ? d.d_q_latent.value() : 0);
    const double of_queries = d_q_latent / (d_q_latent + static_cast<double>(d.d_cache()));
    const auto gather = [&](int64_t bytes, double behind_s) {
      const double one = each(bytes, groups.groups);
      wait(pieces.exchange(one * (1 - of_queries), gather_share), behind_s, groups.groups);
      wait(pieces.exchange(one * of_queries, gather_share), 0);
    };
    gather(sent.all_gather, gather_behind_s);
    gather(sent.reduce_scatter, 0);
    pass(sent.send_recv, hops_behind_s / static_cast<double>(groups.groups));
    plan.between_bytes +=
        std::llround(share * each(sent.all_to_all, 1) + gather_share * each(sent.all_gather + sent.reduce_scatter, 1) +
                     pieces.hop_share() * each(sent.send_recv, 1));
  }
};

}  // namespace

RankGroups rank_groups(const FormPlan& plan, const TrainPlanOptions& options) {
  if (!passes_latents(plan.form)) return {1, options.ranks};
  const int64_t groups = ring_groups(plan.form, options.ranks, options.dims.n_heads, plan.attention);
  return {groups, options.ranks / groups};
}

void estimate_time(const Machine& machine, const TrainPlanOptions& options, FormPlan& plan) {
  Estimate at(machine, options, plan);
  const Work query = at.query_projection(), others = at.other_projections(), up = at.up_projection();
  const auto [forward, backward] = at.attention();
  const double moved =
      at.pieces.memory(2 * at.moved_bytes() + kPackings * static_cast<double>(plan.costs.forward.total()));
  const Work all = query + others + up + forward;
  plan.forward_flops = all.flops;
  plan.compute_s = all.seconds + moved + at.pieces.overhead();
  at.exchange(plan.costs.forward, passes_latents(plan.form) ? 0 : query.seconds, (forward + up).seconds);
  if (!options.backward) return;
  const bool rebuilds_keys =
      plan.form != TrainForm::kExplicit && plan.form != TrainForm::kAbsorbed && plan.attention.rebuilds_keys();
  const Work up_and_attention = (rebuilds_keys ? 3 : 2) * up + backward;
  const Work all_backward = 2 * (query + others) + up_and_attention;
  plan.backward_flops = all_backward.flops;
  plan.compute_s += all_backward.seconds + 2 * (moved + at.pieces.overhead());
  at.exchange(plan.costs.backward, 0, up_and_attention.seconds);
}

}  // namespace parlat
