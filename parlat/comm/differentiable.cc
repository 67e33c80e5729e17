#include "parlat/comm/differentiable.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <numeric>

#include "parlat/base/error.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::variable_list;

// Takes the gradient of y; what it lets go of is free if nobody else holds it.
using Adjoint = std::function<Tensor(Tensor)>;

// y = A x with A linear: the gradient of x is the adjoint of A applied to the gradient of y.
class AdjointNode final : public torch::autograd::Node {
 public:
  AdjointNode(torch::autograd::edge_list next, std::string what, Adjoint adjoint)
      : Node(std::move(next)), what_(std::move(what)), adjoint_(std::move(adjoint)) {}

  variable_list apply(variable_list&& grads) override {
    PARLAT_ASSERT(!at::GradMode::is_enabled(), "the gradient of '{}' is not differentiable", what_);
    // The other ranks wait for this one's part, so a gradient that nothing contributed to is sent as zeros.
    return {adjoint_(grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like())};
  }
  std::string name() const override { return what_; }

 private:
  const std::string what_;
  const Adjoint adjoint_;
};

Tensor connect(Tensor y, const Tensor& x, const std::string& what, Adjoint adjoint) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return y;
  torch::autograd::set_history(
      y, c10::make_intrusive<AdjointNode>(torch::autograd::collect_next_edges(x), what, std::move(adjoint)));
  return y;
}

// What is exchanged, for the memory meter: "laga query" is a query.
Tensor metered_result(const std::string& what, const Tensor& x) { return metered(what.substr(what.find(' ') + 1), x); }
Tensor metered_buffer(const Tensor& x) { return metered("exchange buffers", x); }

// The inverse of local_tokens: writes rank p's tokens to their places in whole.
void place_tokens(const Tensor& local, const Tensor& whole, const SequenceShards& tokens, int p) {
  int64_t begin = 0;
  for (const Range& run : tokens.runs(p)) {
    whole.narrow(1, run.begin, run.size()).copy_(local.narrow(1, begin, run.size()));
    begin += run.size();
  }
}

// Tensors in which the other ranks' tokens arrive: in place where every rank's tokens are one stretch of the whole's
// memory, else in buffers of their own, which finish() copies and frees rank by rank; the whole exists from then on.
class Arrivals {
 public:
  // own: this rank's tokens [B, S_local, ...].
  Arrivals(Tensor own, const SequenceShards& tokens, int rank, std::string what)
      : own_(std::move(own)), tokens_(tokens), rank_(rank), what_(std::move(what)) {
    if (in_place()) allocate();
    for (int p = 0; p < tokens.ranks(); ++p) slots_.push_back(p == rank ? own_.new_empty({0}) : slot(p));
  }

  const std::vector<Tensor>& slots() const { return slots_; }

  Tensor finish() {
    if (!whole_.defined()) allocate();
    for (int p = 0; p < tokens_.ranks(); ++p) {
      if (slots_[p].numel() > 0 && !slots_[p].is_alias_of(whole_)) place_tokens(slots_[p], whole_, tokens_, p);
      slots_[p].reset();
    }
    return std::move(whole_);
  }

 private:
  bool in_place() const {
    if (own_.size(0) != 1) return false;
    for (int p = 0; p < tokens_.ranks(); ++p) {
      if (tokens_.runs(p).size() > 1) return false;
    }
    return true;
  }

  void allocate() {
    std::vector<int64_t> shape = own_.sizes().vec();
    shape[1] = tokens_.sequence();
    whole_ = metered_result(what_, at::empty(shape, own_.options()));
    place_tokens(std::exchange(own_, own_.new_empty({0})), whole_, tokens_, rank_);
  }

  Tensor slot(int p) const {
    if (whole_.defined()) {
      const std::vector<Range>& runs = tokens_.runs(p);
      return runs.empty() ? whole_.narrow(1, 0, 0) : whole_.narrow(1, runs[0].begin, runs[0].size());
    }
    std::vector<int64_t> shape = own_.sizes().vec();
    shape[1] = tokens_.count(p);
    return metered_buffer(at::empty(shape, own_.options()));
  }

  Tensor own_, whole_;
  const SequenceShards tokens_;
  const int rank_;
  const std::string what_;
  std::vector<Tensor> slots_;
};

// Lets go of x as soon as its parts are packed, before there is room for the result.
Tensor heads_to_sequence(Tensor x_local_BSHd, const HeadShards& heads, const SequenceShards& tokens, Communicator& comm,
                         const std::string& what) {
  const at::NoGradGuard no_grad;
  const int rank = comm.rank();
  std::vector<Tensor> send;
  for (int p = 0; p < comm.size(); ++p) {
    const Range range = heads.range(p);
    send.push_back(metered_buffer(x_local_BSHd.narrow(2, range.begin, range.size()).contiguous()));
  }
  x_local_BSHd.reset();
  Arrivals arrivals(std::exchange(send[rank], send[rank].new_empty({0})), tokens, rank, what);
  Handle exchange = comm.all_to_all(std::move(send), arrivals.slots(), what);
  exchange.wait();
  return arrivals.finish();
}

// Lets go of x as soon as its parts are packed (shards of one stretch are parts of x itself), as above.
Tensor sequence_to_heads(Tensor x_BSHd, const HeadShards& heads, const SequenceShards& tokens, Communicator& comm,
                         const std::string& what) {
  const at::NoGradGuard no_grad;
  const int rank = comm.rank();
  const int64_t batch = x_BSHd.size(0), local = tokens.count(rank), width = x_BSHd.size(3);
  std::vector<Tensor> parts, receive;
  for (int p = 0; p < comm.size(); ++p) {
    const Tensor part = local_tokens(x_BSHd, tokens, p);
    parts.push_back(part.is_alias_of(x_BSHd) ? part : metered_buffer(part));
    receive.push_back(
        metered_buffer(at::empty({batch, p == rank ? 0 : local, heads.range(p).size(), width}, x_BSHd.options())));
  }
  x_BSHd.reset();
  const Tensor own = std::exchange(parts[rank], parts[rank].new_empty({0}));
  comm.all_to_all(std::move(parts), receive, what).wait();
  receive[rank] = own;

  const Tensor x_local_BSHd = metered_result(what, at::empty({batch, local, heads.n_heads(), width}, own.options()));
  for (int p = 0; p < comm.size(); ++p) {
    x_local_BSHd.narrow(2, heads.range(p).begin, heads.range(p).size()).copy_(receive[p]);
    receive[p].reset();
  }
  return x_local_BSHd;
}

void check_ranks(const SequenceShards& tokens, const Communicator& comm, const std::string& what) {
  PARLAT_ASSERT(tokens.ranks() == comm.size(), "'{}': shards of {} ranks on {}", what, tokens.ranks(), comm.size());
}

}  // namespace

Tensor scatter_heads_gather_sequence(const Tensor& x_local_BSHd, const HeadShards& heads, const SequenceShards& tokens,
                                     Communicator& comm, const std::string& what) {
  check_ranks(tokens, comm, what);
  check_shape(x_local_BSHd, {kAny, tokens.count(comm.rank()), heads.n_heads(), kAny}, what);
  if (comm.size() == 1) return x_local_BSHd;
  return connect(heads_to_sequence(x_local_BSHd, heads, tokens, comm, what), x_local_BSHd, what,
                 [heads, tokens, &comm, what](Tensor grad_BSHd) {
                   return sequence_to_heads(std::move(grad_BSHd), heads, tokens, comm, what + " gradient");
                 });
}

Tensor scatter_sequence_gather_heads(const Tensor& x_BSHd, const HeadShards& heads, const SequenceShards& tokens,
                                     Communicator& comm, const std::string& what) {
  check_ranks(tokens, comm, what);
  check_shape(x_BSHd, {kAny, tokens.sequence(), heads.range(comm.rank()).size(), kAny}, what);
  if (comm.size() == 1) return x_BSHd;
  return connect(sequence_to_heads(x_BSHd, heads, tokens, comm, what), x_BSHd, what,
                 [heads, tokens, &comm, what](Tensor grad_local_BSHd) {
                   return heads_to_sequence(std::move(grad_local_BSHd), heads, tokens, comm, what + " gradient");
                 });
}

Tensor sum_to_shard(const Tensor& x_BSd, const SequenceShards& tokens, Communicator& comm, const std::string& what) {
  check_ranks(tokens, comm, what);
  check_shape(x_BSd, {kAny, tokens.sequence(), kAny}, what);
  if (comm.size() == 1) return x_BSd;
  const at::NoGradGuard no_grad;
  std::vector<Tensor> parts;
  for (int p = 0; p < comm.size(); ++p) parts.push_back(local_tokens(x_BSd, tokens, p));
  const Tensor sum = metered_result(what, at::empty(parts[comm.rank()].sizes(), x_BSd.options()));
  comm.reduce_scatter(std::move(parts), sum, what).wait();
  return sum;
}

struct PendingGather::State {
  Tensor x_local_BSd;
  SequenceShards tokens;
  Communicator& comm;
  std::string what;
  std::optional<Arrivals> arrivals;
  Handle exchange;
};

PendingGather::PendingGather(const Tensor& x_local_BSd, const SequenceShards& tokens, Communicator& comm,
                             std::string what)
    : state_(new State{x_local_BSd, tokens, comm, std::move(what), {}, {}}) {
  State& state = *state_;
  const int rank = comm.rank();
  check_ranks(tokens, comm, state.what);
  check_shape(x_local_BSd, {kAny, tokens.count(rank), kAny}, state.what);
  if (comm.size() == 1) return;

  const at::NoGradGuard no_grad;
  const Tensor shard_BSd = x_local_BSd.detach().contiguous();
  state.arrivals.emplace(shard_BSd, tokens, rank, state.what);
  std::vector<Tensor> receive = state.arrivals->slots();
  receive[rank] = shard_BSd;
  state.exchange = comm.all_gather(shard_BSd, std::move(receive), state.what);
}

Tensor PendingGather::wait() {
  PARLAT_ASSERT(state_ != nullptr, "a gather is waited for once");
  const std::shared_ptr<State> state = std::exchange(state_, nullptr);
  if (state->comm.size() == 1) return state->x_local_BSd;
  state->exchange.wait();
  Tensor whole_BSd;
  {
    const at::NoGradGuard no_grad;
    whole_BSd = state->arrivals->finish();
  }
  return connect(std::move(whole_BSd), state->x_local_BSd, state->what,
                 [tokens = state->tokens, &comm = state->comm, what = state->what](const Tensor& grad_BSd) {
                   return sum_to_shard(grad_BSd, tokens, comm, what + " gradient");
                 });
}

Tensor exchange_rows(const Tensor& x_nd, const std::vector<int64_t>& send_counts,
                     const std::vector<int64_t>& receive_counts, Communicator& comm, const std::string& what) {
  const auto total = [&](const std::vector<int64_t>& counts) {
    PARLAT_ASSERT(static_cast<int>(counts.size()) == comm.size(), "'{}': {} counts", what, counts.size());
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  check_shape(x_nd, {total(send_counts), kAny}, what);
  const int64_t received = total(receive_counts);
  if (comm.size() == 1) return x_nd;

  Tensor y_nd;
  {
    const at::NoGradGuard no_grad;
    y_nd = metered_result(what, at::empty({received, x_nd.size(1)}, x_nd.options()));
    comm.all_to_all(x_nd.detach().contiguous().split_with_sizes(send_counts), y_nd.split_with_sizes(receive_counts),
                    what)
        .wait();
  }
  return connect(std::move(y_nd), x_nd, what, [send_counts, receive_counts, &comm, what](const Tensor& grad_nd) {
    return exchange_rows(grad_nd, receive_counts, send_counts, comm, what + " gradient");
  });
}

}  // namespace parlat
