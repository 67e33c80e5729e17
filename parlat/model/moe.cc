#include "parlat/model/moe.h"

#include "parlat/base/error.h"
#include "parlat/comm/differentiable.h"
#include "parlat/kernels/gradient_sum.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A reordering of rows: row i of the result is row order[i] of the source, which went to inverse[order[i]] = i.
struct Order {
  Tensor order, inverse;
};

// Rows with smaller keys first, equal keys in their present order.
Order sorted_by(const Tensor& keys) {
  const Tensor order = at::argsort(keys, /*stable=*/true);
  return {order, at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()))};
}

// Every row of x [n, D] `copies` times over, reordered: [n copies, D]. The backward sums a row's copies in their own
// order, not in the order of arrival.
struct SpreadRows : torch::autograd::Function<SpreadRows> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_nD, int64_t copies, const Tensor& order,
                        const Tensor& inverse) {
    ctx->saved_data["copies"] = copies;
    ctx->save_for_backward({inverse});
    return x_nD.index_select(0, order.div(copies, "floor"));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("spread rows");
    const Tensor inverse = ctx->get_saved_variables()[0];
    const int64_t copies = ctx->saved_data["copies"].toInt();
    const Tensor d_rows = grads[0].index_select(0, inverse);
    return {d_rows.view({inverse.numel() / copies, copies, d_rows.size(1)}).sum(1), {}, {}, {}};
  }
};

Tensor reorder(const Tensor& x_nD, const Tensor& order, const Tensor& inverse) {
  return SpreadRows::apply(x_nD, 1, order, inverse);
}

// out[t] = sum over j of weights[t, j] * y[inverse[t k + j]], added in the order of j in fp32 and rounded once.
struct WeightedSum : torch::autograd::Function<WeightedSum> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y_mD, const Tensor& weights_nk, const Tensor& order,
                        const Tensor& inverse) {
    ctx->save_for_backward({y_mD, weights_nk, order, inverse});
    const int64_t n = weights_nk.size(0), k = weights_nk.size(1), d_model = y_mD.size(1);
    const Tensor y_nkD = y_mD.index_select(0, inverse).view({n, k, d_model});
    const Tensor sum_nD = at::zeros({n, d_model}, weights_nk.options());
    for (int64_t j = 0; j < k; ++j) {
      sum_nD.addcmul_(y_nkD.select(1, j).to(sum_nD.scalar_type()), weights_nk.select(1, j).unsqueeze(1));
    }
    return sum_nD.to(y_mD.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("weighted sum");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &y_mD = saved[0], &weights_nk = saved[1], &order = saved[2], &inverse = saved[3];
    const Tensor d_out_nkD = grads[0].to(weights_nk.scalar_type()).unsqueeze(1);  // the same for every j
    const Tensor y_nkD = y_mD.index_select(0, inverse).view({weights_nk.size(0), weights_nk.size(1), y_mD.size(1)});
    const Tensor d_weights_nk = (d_out_nkD * y_nkD.to(weights_nk.scalar_type())).sum(-1);
    const Tensor d_y_nkD = (d_out_nkD * weights_nk.unsqueeze(-1)).to(y_mD.scalar_type());
    return {d_y_nkD.view(y_mD.sizes()).index_select(0, order), d_weights_nk, {}, {}};
  }
};

// Which rows go where. A rank sends its rows sorted by (expert, token), so that those of one rank's experts are
// consecutive; it receives them by (source, expert, token) and computes them by (expert, source, token).
struct Dispatch {
  Order by_expert;                      // of the rows sent: n k of them
  std::vector<int64_t> send_counts;     // to each rank
  std::vector<int64_t> receive_counts;  // from each rank
  Order arrived_by_expert;              // of the rows received
  std::vector<int64_t> expert_counts;   // of the rows received, a local expert
};

std::vector<int64_t> to_vector(const Tensor& counts) {
  return {counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + counts.numel()};
}

// Rows of each expert. Without values (on the meta device) every expert gets an even share.
Tensor count_rows(const MoeSpec& spec, const Tensor& expert_of_row) {
  if (!expert_of_row.is_meta()) return at::bincount(expert_of_row, {}, spec.n_routed);
  Tensor counts_E = at::empty({spec.n_routed}, at::kLong);
  for (int64_t e = 0; e < spec.n_routed; ++e) counts_E[e] = even_share(expert_of_row.numel(), spec.n_routed, e).size();
  return counts_E;
}

Dispatch plan_dispatch(const MoeSpec& spec, const Tensor& experts_nk, Communicator& comm) {
  const Tensor expert_of_row = experts_nk.flatten();
  const Tensor counts_E = count_rows(spec, expert_of_row);
  const int64_t n_local = even_share(spec.n_routed, comm.size(), comm.rank()).size();
  std::vector<Tensor> send, receive;
  for (int p = 0; p < comm.size(); ++p) {
    const Range theirs = even_share(spec.n_routed, comm.size(), p);
    send.push_back(counts_E.narrow(0, theirs.begin, theirs.size()));
    receive.push_back(at::empty({n_local}, at::kLong));
  }
  comm.all_to_all(send, receive, "expert counts").wait();

  Dispatch plan;
  plan.by_expert = sorted_by(expert_of_row);
  for (const Tensor& counts : send) plan.send_counts.push_back(counts.sum().item<int64_t>());
  const Tensor received_Pe = at::stack(receive);
  plan.receive_counts = to_vector(received_Pe.sum(1));
  plan.expert_counts = to_vector(received_Pe.sum(0));
  const Tensor expert_of_run = at::arange(n_local, at::kLong).repeat(comm.size());
  plan.arrived_by_expert = sorted_by(at::repeat_interleave(expert_of_run, received_Pe.flatten()));
  return plan;
}

// rows [m, D] grouped by local expert, counts[i] of expert i -> [m, D]. Experts without rows run too: every rank's
// graph then holds every weight it owns.
Tensor run_experts(const std::vector<MlpWeights>& experts, const std::vector<int64_t>& counts, const Tensor& rows_mD) {
  std::vector<Tensor> outputs = {rows_mD.narrow(0, 0, 0)};  // a rank without experts still returns what it got: nothing
  int64_t begin = 0;
  for (size_t i = 0; i < experts.size(); ++i) {
    outputs.push_back(mlp(experts[i], rows_mD.narrow(0, begin, counts[i])));
    begin += counts[i];
  }
  return at::cat(outputs);
}

}  // namespace

Tensor mixture_of_experts(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD, Communicator& experts) {
  check_shape(x_nD, {kAny, w.w_router.size(1)}, "x");
  PARLAT_ASSERT(w.local_experts == even_share(spec.n_routed, experts.size(), experts.rank()) &&
                    static_cast<int64_t>(w.experts.size()) == w.local_experts.size(),
                "experts {} to {} on rank {} of {}", w.local_experts.begin, w.local_experts.end, experts.rank(),
                experts.size());
  const Routing routing = route(spec, w, x_nD);
  const Dispatch plan = plan_dispatch(spec, routing.experts_nk, experts);
  const auto& [order, inverse] = plan.by_expert;
  const auto& [arrived_order, arrived_inverse] = plan.arrived_by_expert;

  const Tensor sent = SpreadRows::apply(x_nD, spec.experts_per_token, order, inverse);
  const Tensor arrived = exchange_rows(sent, plan.send_counts, plan.receive_counts, experts, "expert dispatch");
  const Tensor computed = run_experts(w.experts, plan.expert_counts, reorder(arrived, arrived_order, arrived_inverse));
  const Tensor returned = exchange_rows(reorder(computed, arrived_inverse, arrived_order), plan.receive_counts,
                                        plan.send_counts, experts, "expert combine");
  const Tensor out_nD = WeightedSum::apply(returned, routing.weights_nk, order, inverse);
  return w.shared ? out_nD + mlp(*w.shared, x_nD) : out_nD;
}

}  // namespace parlat
