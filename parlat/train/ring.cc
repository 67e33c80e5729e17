#include "parlat/train/ring.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "parlat/base/error.h"
#include "parlat/kernels/fused_passes.h"
#include "parlat/kernels/gemm.h"
#include "parlat/mla/projections.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// How many of a rank's tokens come before global index `end`.
int64_t count_before(const std::vector<Range>& runs, int64_t end) {
  int64_t count = 0;
  for (const Range& run : runs) count += std::clamp(end, run.begin, run.end) - run.begin;
  return count;
}

// Which of rank `owner`'s tokens the tokens of rank `rank` see. Both lie in increasing order, so that what a query sees
// of the owner's is one interval, too.
KeyRanges visible_part(const TokenShard& tokens, int rank, int owner) {
  const std::vector<Range>& keys = tokens.shards.runs(owner);
  std::vector<Range> rows;
  for (int64_t b = 0; b < tokens.batch(); ++b) {
    for (const Range& run : tokens.shards.runs(rank)) {
      for (int64_t s = run.begin; s < run.end; ++s) {
        const Range& seen = tokens.visible.row(b, s);
        rows.push_back({count_before(keys, seen.begin), count_before(keys, seen.end)});
      }
    }
  }
  return {tokens.batch(), tokens.shards.count(rank), tokens.shards.count(owner), std::move(rows)};
}

// What a rank does hop by hop. At hop k it holds the latents of rank `rank - k`.
struct Ring final : torch::CustomClassHolder {
  Ring(const MlaSpec& spec, const TokenShard& tokens, Communicator& comm)
      : comm(comm), scale(spec.softmax_scale()), d_nope(spec.dims.d_nope), batch(tokens.batch()) {
    for (int hop = 0; hop < comm.size(); ++hop) visible.push_back(visible_part(tokens, comm.rank(), owner(hop)));
  }
  int owner(int hop) const { return (comm.rank() - hop + comm.size()) % comm.size(); }
  int64_t count(int hop) const { return visible[hop % comm.size()].n_keys(); }

  // Passes `send` on and receives what the neighbour held, as large as what this rank holds at `hop`.
  Handle pass_on(const Tensor& send, Tensor& receive, int hop, const char* what) const {
    receive = at::empty({batch, count(hop), send.size(2)}, send.options());
    const int next = (comm.rank() + 1) % comm.size();
    return comm.send_recv(send, next, receive, owner(1), what);
  }

  Communicator& comm;
  double scale;
  int64_t d_nope, batch;
  std::vector<KeyRanges> visible;  // by hop
};

// Calls body(hop, latents) for every rank's latents, the next being under way meanwhile.
template <typename Body>
void for_each_hop(const Ring& ring, const Tensor& latent_BSd, const char* what, const Body& body) {
  Tensor here = latent_BSd.contiguous();
  for (int hop = 0; hop < ring.comm.size(); ++hop) {
    Tensor next;
    Handle exchange;
    if (hop + 1 < ring.comm.size()) exchange = ring.pass_on(here, next, hop + 1, what);
    body(hop, here);
    exchange.wait();
    here = next;
  }
}

// The gradients of latents, each following its latents from rank to rank and arriving at their owner with the last hop:
// what each rank finds is added in the order in which they pass.
class TravellingGradient {
 public:
  explicit TravellingGradient(const Ring& ring) : ring_(ring) {}
  // `found`: the gradient of the latents held at this hop, from this rank's queries.
  void add(int hop, const Tensor& found_BSd) {
    if (hop == 0) {
      own_ = found_BSd;
      return;
    }
    if (hop > 1) {
      exchange_.wait();
      found_BSd.add_(arriving_);
    }
    exchange_ = ring_.pass_on(found_BSd, arriving_, hop + 1, "ring latent gradient");
  }
  Tensor of_own_latents() {
    if (ring_.comm.size() > 1) {
      exchange_.wait();
      own_.add_(arriving_);
    }
    return own_;
  }

 private:
  const Ring& ring_;
  Tensor own_, arriving_;
  Handle exchange_;
};

class RingFunction : public torch::autograd::Function<RingFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& latent, const Tensor& w_ukv,
                        const c10::intrusive_ptr<Ring>& ring) {
    const int64_t n_heads = q.size(2), d_v = w_ukv.size(0) / n_heads - ring->d_nope;
    const at::TensorOptions wide = q.options().dtype(compute_dtype(q.scalar_type())).requires_grad(false);
    const Tensor sum = at::empty({q.size(0), q.size(1), n_heads, d_v}, wide);
    const Tensor lse = at::empty({q.size(0), q.size(1), n_heads}, wide);
    for_each_hop(*ring, latent, "ring latent", [&](int hop, const Tensor& here) {
      fused_forward({q, ring->visible[hop], ring->scale}, LatentKeys(here, w_ukv, n_heads, ring->d_nope), sum, lse,
                    /*resume=*/hop > 0);
    });
    const Tensor out = sum.to(q.scalar_type());
    ctx->save_for_backward({q, latent, w_ukv, out, lse});
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &latent = saved[1], &w_ukv = saved[2];
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(ctx->saved_data["ring"].toCapsule());
    const auto wide_zeros = [&](const Tensor& like) {
      return at::zeros(like.sizes(), like.options().dtype(compute_dtype(q.scalar_type())).requires_grad(false));
    };
    const Tensor grad_q = wide_zeros(q), grad_w = wide_zeros(w_ukv);
    TravellingGradient travelling(*ring);
    for_each_hop(*ring, latent, "ring latent again", [&](int hop, const Tensor& here) {
      const Tensor grad_here = wide_zeros(here);
      const LatentKeys keys(here, w_ukv, q.size(2), ring->d_nope, grad_here, grad_w);
      fused_backward({q, ring->visible[hop], ring->scale}, keys, saved[3], saved[4], grad[0], grad_q,
                     /*parts=*/ring->comm.size() > 1);
      travelling.add(hop, grad_here);
    });
    return {grad_q.to(q.scalar_type()),
            travelling.of_own_latents().to(latent.scalar_type()),
            grad_w.to(w_ukv.scalar_type()),
            {}};
  }
};

}  // namespace

Tensor RingAttention::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  check_shape(x_BSD, {tokens.batch(), tokens.local_count(), w.dims().d_model}, "x");
  const Tensor latent_BSd = project_latent(w, x_BSD, tokens.rope), q_BSHd = project_query(w, x_BSD, tokens.rope);
  return project_output(
      w, RingFunction::apply(q_BSHd, latent_BSd, w.w_ukv, c10::make_intrusive<Ring>(w.spec, tokens, comm_)));
}

}  // namespace parlat
