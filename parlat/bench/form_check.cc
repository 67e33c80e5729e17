#include "parlat/bench/form_check.h"

#include <algorithm>

#include "parlat/tensor/compare.h"
#include "parlat/train/forms.h"

namespace parlat {

namespace {

// Sums that follow one another: down-projection, norm, up-projection, scores, weighted values, output; and back.
constexpr int64_t kForwardDepth = 6;
constexpr int64_t kBackwardDepth = 12;

int64_t longest_sum(const LayerCase& layer) {
  const MlaDims& d = layer.weights.dims();
  return std::max({d.d_model, d.d_q_latent.value_or(0), d.d_latent, d.n_heads * d.d_qk(), d.n_heads * d.d_v,
                   layer.batch() * layer.sequence()});
}

// This rank's even share of the rows of a tensor that every rank holds a summand of, summed over ranks.
Tensor sum_of_rows(const Tensor& summand, Communicator& comm) {
  const auto accumulator = summand.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor wide = summand.to(accumulator).contiguous();
  std::vector<Tensor> parts;
  for (int p = 0; p < comm.size(); ++p) {
    const Range share = even_share(wide.size(0), comm.size(), p);
    parts.push_back(wide.narrow(0, share.begin, share.size()));
  }
  Tensor sum = at::empty_like(parts[comm.rank()]);
  comm.reduce_scatter(std::move(parts), sum, "gradient of the form under test").wait();
  return sum;
}

// Keeps the tensor that uses up most of its tolerance.
class Worst {
 public:
  Worst(Communicator& comm, int64_t terms, at::ScalarType dtype) : comm_(comm), terms_(terms), dtype_(dtype) {}

  // got and want: this rank's part of `whole`.
  void add(const std::string& name, const Tensor& got, const Tensor& want, const Tensor& whole, int64_t depth) {
    const Tolerance tolerance = Tolerance::rounding(dtype_, terms_, depth);
    const double local_error = compare(got, want, tolerance, scale_of(whole)).relative;
    const double relative = comm_.max_over_ranks(local_error, "error of the form under test");
    if (check_.worst.empty() || relative * check_.tolerance > check_.max_error * tolerance.relative_to_norm) {
      check_ = {.worst = name, .max_error = relative, .tolerance = tolerance.relative_to_norm};
    }
  }

  FormCheck result() const {
    FormCheck check = check_;
    check.ok = check.max_error <= check.tolerance;
    return check;
  }

 private:
  Communicator& comm_;
  int64_t terms_;
  at::ScalarType dtype_;
  FormCheck check_;
};

}  // namespace

std::string FormCheck::text() const {
  return fmt::format("{}: {:.2e} of its size against {:.2e} allowed", worst, max_error, tolerance);
}

OracleResult oracle_of(const LayerCase& layer) {
  return oracle_forward_backward(layer.weights, layer.x_BSD, layer.grad_out_BSD, layer.documents);
}

FormCheck check_form(TrainForm form, const AttentionOptions& options, const LayerCase& layer, const OracleResult& want,
                     Communicator& comm) {
  const RankLayer local = rank_layer(layer, /*requires_grad=*/true, comm);
  const Tensor out =
      make_attention(form, comm, layer.weights.dims(), options)->forward(local.weights, local.x_BSD, local.tokens);
  out.backward(local.grad_out_BSD);

  Worst worst(comm, longest_sum(layer), layer.x_BSD.scalar_type());
  const SequenceShards& shards = local.tokens.shards;
  worst.add("out", out, local_tokens(want.out, shards, comm.rank()), want.out, kForwardDepth);
  for (const auto& [name, leaf] : local.leaves()) {
    const Tensor& whole = want.gradients.at(name);
    if (name == "x") {
      worst.add(name, leaf.grad(), local_tokens(whole, shards, comm.rank()), whole, kBackwardDepth);
      continue;
    }
    const Range rows = even_share(whole.size(0), comm.size(), comm.rank());
    const Tensor grad = leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf);
    worst.add(name, sum_of_rows(grad, comm), whole.narrow(0, rows.begin, rows.size()), whole, kBackwardDepth);
  }
  return worst.result();
}

}  // namespace parlat
