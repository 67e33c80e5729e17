// The MLP and the mixture of experts: against plain torch operations, over ranks, and by central differences.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <mutex>

#include "parlat/model/moe.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 5;
constexpr int64_t kModel = 12;

using NamedTensors = std::map<std::string, Tensor>;

MlpWeights random_mlp(int64_t width, const std::string& name, at::ScalarType dtype) {
  return {.w_gate = seeded_normal({width, kModel}, 0.5, kSeed, name + ".gate", dtype),
          .w_up = seeded_normal({width, kModel}, 0.5, kSeed, name + ".up", dtype),
          .w_down = seeded_normal({kModel, width}, 0.5, kSeed, name + ".down", dtype)};
}

MoeSpec small_spec(Gating gating) {
  return {.n_routed = 8,
          .n_shared = 1,
          .experts_per_token = 3,
          .d_expert = 7,
          .gating = gating,
          .n_group = 4,
          .topk_group = 2,
          .norm_topk_prob = gating == Gating::kNoauxTc,
          .routed_scaling_factor = 2.5};
}

MoeWeights random_moe(const MoeSpec& spec, Range local, at::ScalarType dtype) {
  MoeWeights w;
  w.w_router = seeded_normal({spec.n_routed, kModel}, 0.5, kSeed, "router", dtype);
  w.selection_bias = seeded_normal({spec.n_routed}, 0.2, kSeed, "bias");
  w.local_experts = local;
  for (int64_t e = local.begin; e < local.end; ++e) {
    w.experts.push_back(random_mlp(spec.d_expert, fmt::format("expert {}", e), dtype));
  }
  w.shared = random_mlp(spec.d_expert, "shared", dtype);
  return w;
}

NamedTensors named(MlpWeights& w, const std::string& name) {
  return {{name + ".gate", w.w_gate}, {name + ".up", w.w_up}, {name + ".down", w.w_down}};
}

NamedTensors named(MoeWeights& w) {
  NamedTensors all = {{"router", w.w_router}};
  for (size_t i = 0; i < w.experts.size(); ++i) {
    all.merge(named(w.experts[i], fmt::format("expert {}", w.local_experts.begin + static_cast<int64_t>(i))));
  }
  all.merge(named(*w.shared, "shared"));
  return all;
}

struct MoeResult {
  Tensor out, d_x;
  NamedTensors gradients;  // summed over ranks
};

// `tokens[r]` of x on rank r; the gradient of sum(out * g).
MoeResult run_moe(const MoeSpec& spec, const Tensor& x_nD, const std::vector<int64_t>& tokens) {
  const Tensor g = seeded_normal(x_nD.sizes(), 1.0, kSeed, "g", x_nD.scalar_type());
  const int ranks = static_cast<int>(tokens.size());
  const std::vector<Tensor> x_parts = x_nD.split_with_sizes(tokens), g_parts = g.split_with_sizes(tokens);
  std::vector<Tensor> outs(ranks), d_xs(ranks);
  std::vector<NamedTensors> gradients(ranks);
  run_ranks(ranks, [&](Communicator& comm) {
    const int r = comm.rank();
    MoeWeights w = random_moe(spec, even_share(spec.n_routed, ranks, r), x_nD.scalar_type());
    for (auto& [name, tensor] : named(w)) tensor.requires_grad_();
    const Tensor x = x_parts[r].clone().requires_grad_();
    const Tensor out = mixture_of_experts(spec, w, x, comm);
    out.backward(g_parts[r]);
    outs[r] = out.detach();
    d_xs[r] = x.grad();
    for (auto& [name, tensor] : named(w)) gradients[r][name] = tensor.grad();
  });
  MoeResult result{.out = at::cat(outs), .d_x = at::cat(d_xs), .gradients = {}};
  for (const NamedTensors& rank : gradients) {
    for (const auto& [name, gradient] : rank) {
      EXPECT_TRUE(gradient.defined()) << name << ": no gradient on a rank that holds it";
      Tensor& sum = result.gradients[name];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  return result;
}

void expect_same(const MoeResult& got, const MoeResult& want, Tolerance tolerance) {
  EXPECT_CLOSE(got.out, want.out, tolerance);
  EXPECT_CLOSE(got.d_x, want.d_x, tolerance);
  for (const auto& [name, gradient] : want.gradients) {
    ASSERT_EQ(got.gradients.count(name), 1u) << name;
    EXPECT_CLOSE(got.gradients.at(name), gradient, tolerance) << name;
  }
}

Tensor plain_mlp(const MlpWeights& w, const Tensor& x) {
  return at::linear(at::silu(at::linear(x, w.w_gate)) * at::linear(x, w.w_up), w.w_down);
}

// Every token through every expert, weighted by zero where it was not chosen.
MoeResult dense_moe(const MoeSpec& spec, const Tensor& x_nD) {
  MoeWeights w = random_moe(spec, {0, spec.n_routed}, x_nD.scalar_type());
  for (auto& [name, tensor] : named(w)) tensor.requires_grad_();
  const Tensor x = x_nD.clone().requires_grad_();
  const Routing routing = route(spec, w, x);
  Tensor out = plain_mlp(*w.shared, x);
  for (int64_t e = 0; e < spec.n_routed; ++e) {
    const Tensor weight_n = (routing.weights_nk * routing.experts_nk.eq(e)).sum(-1);
    out = out + weight_n.unsqueeze(1) * plain_mlp(w.experts[e], x);
  }
  out.backward(seeded_normal(x.sizes(), 1.0, kSeed, "g", x.scalar_type()));
  MoeResult result{.out = out.detach(), .d_x = x.grad(), .gradients = {}};
  for (auto& [name, tensor] : named(w)) result.gradients[name] = tensor.grad();
  return result;
}

// 29 tokens x 3 experts: sums of at most 87 products.
Tolerance rounding(at::ScalarType dtype) { return Tolerance::rounding(dtype, 87, 8); }

class EveryGatingOfMoe : public ::testing::TestWithParam<Gating> {};

TEST_P(EveryGatingOfMoe, EqualsDenseEvaluation) {
  const MoeSpec spec = small_spec(GetParam());
  const Tensor x = seeded_normal({29, kModel}, 1.0, kSeed, "x", at::kDouble);
  expect_same(run_moe(spec, x, {29}), dense_moe(spec, x), rounding(at::kDouble));
}

TEST_P(EveryGatingOfMoe, RanksAgreeWithOne) {
  const MoeSpec spec = small_spec(GetParam());
  const Tensor x = seeded_normal({29, kModel}, 1.0, kSeed, "x");
  const MoeResult want = run_moe(spec, x, {29});
  for (const std::vector<int64_t>& tokens :
       {std::vector<int64_t>{15, 14}, {29, 0}, {10, 0, 19}, {0, 0, 29}, {8, 7, 7, 7}, {1, 28, 0, 0}}) {
    SCOPED_TRACE(::testing::PrintToString(tokens));
    expect_same(run_moe(spec, x, tokens), want, rounding(at::kFloat));
  }
}

// Most experts, and three of four ranks, without a token.
TEST_P(EveryGatingOfMoe, OneTokenChoosesAFewExperts) {
  const MoeSpec spec = small_spec(GetParam());
  const Tensor x = seeded_normal({1, kModel}, 1.0, kSeed, "one");
  const MoeResult want = run_moe(spec, x, {1});
  expect_same(run_moe(spec, x, {0, 0, 0, 1}), want, rounding(at::kFloat));
}

INSTANTIATE_TEST_SUITE_P(Gatings, EveryGatingOfMoe,
                         ::testing::Values(Gating::kGreedy, Gating::kGroupLimitedGreedy, Gating::kNoauxTc));

// Dispatch and combine each carry the rows of other ranks' experts, and the counts 8 bytes each.
TEST(ExpertTraffic, IsTheRowsForOtherRanks) {
  const MoeSpec spec = small_spec(Gating::kNoauxTc);
  const Tensor x = seeded_normal({10, kModel}, 1.0, kSeed, "x");
  const std::vector<Tensor> parts = x.split_with_sizes({6, 4});
  std::array<int64_t, 2> sent{}, rows_away{};
  run_ranks(2, [&](Communicator& comm) {
    const Range local = even_share(spec.n_routed, 2, comm.rank());
    const MoeWeights w = random_moe(spec, local, at::kFloat);
    mixture_of_experts(spec, w, parts[comm.rank()], comm);
    sent[comm.rank()] = comm.traffic()[Collective::kAllToAll].bytes;
    const Tensor experts = route(spec, w, parts[comm.rank()]).experts_nk;
    rows_away[comm.rank()] = experts.lt(local.begin).logical_or(experts.ge(local.end)).sum().item<int64_t>();
  });
  for (const int r : {0, 1}) {
    const int64_t rows = rows_away[0] + rows_away[1];  // dispatched by one rank, combined by the other
    EXPECT_EQ(sent[r], rows * kModel * 4 + 4 * 8) << "rank " << r;
  }
}

TEST(Mlp, EqualsPlainOperations) {
  MlpWeights w = random_mlp(9, "mlp", at::kDouble);
  const Tensor x = seeded_normal({2, 5, kModel}, 1.0, kSeed, "x", at::kDouble);
  const Tensor g = seeded_normal({2, 5, kModel}, 1.0, kSeed, "g", at::kDouble);
  std::vector<Tensor> inputs = {w.w_gate, w.w_up, w.w_down, x};
  const auto run = [&](const auto& function) {
    for (Tensor& input : inputs) input.requires_grad_().mutable_grad() = Tensor();
    const Tensor out = function(w, x);
    out.backward(g);
    std::vector<Tensor> result = {out.detach()};
    for (const Tensor& input : inputs) result.push_back(input.grad());
    return result;
  };
  const std::vector<Tensor> want = run(plain_mlp);
  const std::vector<Tensor> got = run([](const MlpWeights& weights, const Tensor& in) { return mlp(weights, in); });
  for (size_t i = 0; i < want.size(); ++i) EXPECT_CLOSE(got[i], want[i], Tolerance::rounding(at::kDouble, 12, 6)) << i;
}

// f(+) - f(-) over 2 h in a random direction of each input, against the gradient. With h = eps^(1/3) truncation and
// rounding are both about h^2 of the values.
TEST(CentralDifferences, OfMlpAndMixture) {
  const MoeSpec spec = small_spec(Gating::kNoauxTc);
  const Tensor x = seeded_normal({5, kModel}, 1.0, kSeed, "x", at::kDouble).requires_grad_();
  const Tensor g = seeded_normal({5, kModel}, 1.0, kSeed, "g", at::kDouble);
  MoeWeights w = random_moe(spec, {0, spec.n_routed}, at::kDouble);
  NamedTensors inputs = named(w);
  inputs["x"] = x;
  for (auto& [name, tensor] : inputs) tensor.requires_grad_();
  const double h = std::cbrt(std::ldexp(1.0, -53));
  run_ranks(1, [&](Communicator& comm) {
    const auto value = [&] { return (mixture_of_experts(spec, w, x, comm) * g).sum(); };
    value().backward();
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : inputs) {
      const Tensor direction = seeded_normal(tensor.sizes(), 1.0, kSeed, "direction " + name, at::kDouble);
      tensor.add_(direction, h);
      const double above = value().item<double>();
      tensor.add_(direction, -2 * h);
      const double below = value().item<double>();
      tensor.add_(direction, h);
      const double want = (above - below) / (2 * h);
      const double scale = tensor.grad().norm().item<double>() * direction.norm().item<double>() + std::abs(above);
      EXPECT_NEAR((tensor.grad() * direction).sum().item<double>(), want, 100 * h * h * scale) << name;
    }
  });
}

}  // namespace
}  // namespace parlat
