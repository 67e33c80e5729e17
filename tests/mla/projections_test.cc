// Each projection against plain torch, its gradients, and what it keeps for the backward pass.
#include "parlat/mla/projections.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/base/error.h"
#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/central_differences.h"
#include "tests/kernels/forced_gemm.h"
#include "tests/mla/layer.h"
#include "tests/mla/rotated.h"

namespace parlat {
namespace {

constexpr double kEps = 1e-6;

Tensor fp64(const Tensor& x) { return x.to(at::kDouble); }

Tensor exact_rms_norm(const Tensor& x, const Tensor& weight) {
  return fp64(x) * (fp64(x).square().mean({-1}, true) + kEps).rsqrt() * fp64(weight);
}

class Projections : public OnEveryGemmPath {
 protected:
  Tolerance rounding(int64_t terms, int64_t depth) const { return Tolerance::rounding(dtype(), terms, depth); }
  Layer layer(std::optional<int64_t> d_q_latent = 24) const {
    return make_layer({.d_q_latent = d_q_latent, .dtype = dtype()});
  }
};

TEST_P(Projections, RmsNorm) {
  const Tensor x = seeded_normal({3, 50, 24}, 2, kSeed, "x", dtype()).narrow(2, 1, 20), weight = layer().w.kv_norm;
  EXPECT_CLOSE(rms_norm(x, weight, kEps), exact_rms_norm(x, weight), rounding(20, 2));
}

TEST_P(Projections, RmsNormGradients) {
  const Tensor x = seeded_normal({3, 50, 20}, 2, kSeed, "x", dtype()).requires_grad_(), weight = layer().w.kv_norm;
  const Tensor grad = seeded_normal({3, 20, 50}, 1, kSeed, "grad", dtype()).mT();
  const auto got = torch::autograd::grad({rms_norm(x, weight, kEps)}, {x, weight}, {grad});
  const auto want = torch::autograd::grad({exact_rms_norm(x, weight)}, {x, weight}, {fp64(grad)});
  EXPECT_CLOSE(got[0], want[0], rounding(20, 4));
  EXPECT_CLOSE(got[1], want[1], rounding(150, 2));
}

TEST_P(Projections, QueryWithLatent) {
  const Layer l = layer();
  const Tensor c_q = exact_rms_norm(at::matmul(fp64(l.x_BSD), fp64(l.w.w_dq).t()), l.w.q_norm);
  const Tensor q = at::matmul(c_q, fp64(l.w.w_uq).t()).unflatten(-1, {5, 24});
  const Tensor want = at::cat({q.narrow(3, 0, 16), rotated(q.narrow(3, 16, 8), l.rope())}, 3);
  EXPECT_CLOSE(project_query(l.w, l.x_BSD, l.rope()), want, rounding(40, 4));
}

TEST_P(Projections, QueryWithoutLatent) {
  const Layer l = layer(std::nullopt);
  const Tensor q = at::matmul(fp64(l.x_BSD), fp64(l.w.w_uq).t()).unflatten(-1, {5, 24});
  const Tensor want = at::cat({q.narrow(3, 0, 16), rotated(q.narrow(3, 16, 8), l.rope())}, 3);
  EXPECT_CLOSE(project_query(l.w, l.x_BSD, l.rope()), want, rounding(40, 2));
}

TEST_P(Projections, RefuseWeightsOfOtherShapes) {
  Layer l = layer();
  const Tensor w_uq = std::exchange(l.w.w_uq, l.w.w_uq.narrow(0, 0, 4 * 24));
  EXPECT_THROW(project_query(l.w, l.x_BSD, l.rope()), ConfigError);
  l.w.w_uq = w_uq;
  l.w.q_norm = l.w.q_norm.narrow(0, 0, 1);  // would be repeated
  EXPECT_THROW(project_query(l.w, l.x_BSD, l.rope()), ConfigError);
}

TEST_P(Projections, Latent) {
  const Layer l = layer();
  const Tensor raw = at::matmul(fp64(l.x_BSD), fp64(l.w.w_dkv).t());
  const Tensor k_rope = rotated(raw.narrow(2, 20, 8).unsqueeze(2), l.rope()).squeeze(2);
  const Tensor want = at::cat({exact_rms_norm(raw.narrow(2, 0, 20), l.w.kv_norm), k_rope}, 2);
  EXPECT_CLOSE(project_latent(l.w, l.x_BSD, l.rope()), want, rounding(40, 3));
}

TEST_P(Projections, KeysAndValuesOfSomeHeads) {
  const Layer l = layer();
  const Tensor latent = seeded_normal({2, 35, 28}, 1, kSeed, "latent", dtype()), w = up_projection(l.w, {1, 4});
  EXPECT_TRUE(w.is_alias_of(l.w.w_ukv));
  const KeysValues got = up_project(w, latent, l.spec.dims);
  const Tensor kv =
      at::matmul(fp64(latent.narrow(2, 0, 20)), fp64(l.w.w_ukv).t()).unflatten(-1, {5, 28}).narrow(2, 1, 3);
  EXPECT_CLOSE(got.k_BTHd.narrow(3, 0, 16), kv.narrow(3, 0, 16), rounding(20, 1));
  EXPECT_CLOSE(got.v_BTHV, kv.narrow(3, 16, 12), rounding(20, 1));
  for (int64_t h = 0; h < 3; ++h) EXPECT_TRUE(got.k_BTHd.select(2, h).narrow(2, 16, 8).equal(latent.narrow(2, 20, 8)));
}

TEST_P(Projections, Output) {
  const Layer l = layer();
  const Tensor out = seeded_normal({2, 35, 5, 12}, 1, kSeed, "out", dtype());
  EXPECT_CLOSE(project_output(l.w, out), at::matmul(fp64(out).flatten(2), fp64(l.w.w_o).t()), rounding(60, 1));
}

// The bytes that live after a forward pass, its output included, are those the headers name.
TEST_P(Projections, KeepWhatTheyName) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Layer l = layer();
  const RopeTable rope = l.rope();
  const int64_t tokens = 2 * 35, element = c10::elementSize(dtype()), wide = dtype() == at::kDouble ? 8 : 4;
  const auto bytes_of = [&](const auto& project) {
    meter.reset();
    const auto result = project();
    return meter.current_bytes();
  };
  EXPECT_EQ(bytes_of([&] { return rms_norm(l.x_BSD, at::ones({40}, dtype()), kEps); }),
            tokens * (40 * element + wide) + 40 * element);
  EXPECT_EQ(bytes_of([&] { return project_query(l.w, l.x_BSD, rope); }), tokens * ((24 + 5 * 24) * element + wide));
  EXPECT_EQ(bytes_of([&] { return project_latent(l.w, l.x_BSD, rope); }), tokens * (2 * 28 * element + wide));
  const Tensor latent = project_latent(l.w, l.x_BSD, rope);
  EXPECT_EQ(bytes_of([&] { return up_project(l.w.w_ukv, latent, l.spec.dims); }), tokens * 5 * (24 + 12) * element);
}

INSTANTIATE_TEST_SUITE_P(Paths, Projections, kGemmPaths, gemm_path_name);

TEST(Projections, AgreeWithCentralDifferences) {
  const auto random = [](at::IntArrayRef shape, const char* name) { return seeded_normal(shape, 1, kSeed, name); };
  expect_gradients([](const auto& in) { return std::vector{rms_norm(in[0], in[1], kEps)}; },
                   {random({2, 3, 4}, "x"), random({4}, "weight")});

  MlaSpec spec;
  spec.dims = {.d_model = 4, .n_heads = 2, .d_nope = 2, .d_rope = 4, .d_v = 3, .d_latent = 3, .d_q_latent = 3};
  const MlaWeights w = random_mla_weights(spec, kSeed, at::kDouble);
  const RopeTable rope = rope_table(spec.rope, 4, at::arange(3, at::kLong).unsqueeze(0), at::kDouble);
  const Tensor x = random({1, 3, 4}, "x");
  expect_gradients(
      [&](const auto& in) {
        MlaWeights v = w;
        v.w_dq = in[1];
        v.q_norm = in[2];
        v.w_uq = in[3];
        return std::vector{project_query(v, in[0], rope)};
      },
      {x, w.w_dq, w.q_norm, w.w_uq});
  expect_gradients(
      [&](const auto& in) {
        MlaWeights v = w;
        v.w_dkv = in[1];
        v.kv_norm = in[2];
        return std::vector{project_latent(v, in[0], rope)};
      },
      {x, w.w_dkv, w.kv_norm});
  expect_gradients(
      [&](const auto& in) {
        const KeysValues kv = up_project(in[0], in[1], spec.dims);
        return std::vector{kv.k_BTHd, kv.v_BTHV};
      },
      {w.w_ukv, random({1, 3, 7}, "latent")});
}

TEST(Projections, WrongShapesAreNamed) {
  const Layer l = make_layer({});
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message([&] {
              project_query(l.w, at::ones({2, 35, 39}), l.rope());
            }),
            "x: expected shape [*, *, 40], got [2, 35, 39]");
  EXPECT_EQ(message([&] {
              up_project(l.w.w_ukv, at::ones({2, 35, 27}), l.spec.dims);
            }),
            "latent: expected shape [*, *, 28], got [2, 35, 27]");
  EXPECT_EQ(message([&] {
              project_output(l.w, at::ones({2, 35, 4, 12}));
            }),
            "out: expected shape [*, *, 5, 12], got [2, 35, 4, 12]");
}

}  // namespace
}  // namespace parlat
