// Tables against the formulas of docs/mathematics.md section 3, written down a second time; rotations by their scores.
#include "parlat/mla/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "parlat/base/error.h"
#include "parlat/config/model_config.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"
#include "tests/mla/rotated.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 9;
constexpr int64_t kRope = 8;

RopeSpec yarn() {
  RopeSpec rope;
  rope.type = RopeSpec::Type::kYarn;
  rope.factor = 40;
  rope.original_max_positions = 64;
  rope.mscale = 1.0;
  rope.mscale_all_dim = 0.707;
  return rope;
}

Tensor positions(int64_t n) { return at::arange(n, at::kLong).unsqueeze(0); }

// One inverse frequency from the definition.
double frequency(const RopeSpec& rope, int64_t i) {
  const double plain = std::pow(rope.theta, -2.0 * static_cast<double>(i) / kRope);
  if (rope.type == RopeSpec::Type::kDefault) return plain;
  const auto find_dim = [&](double n) {
    return kRope * std::log(static_cast<double>(rope.original_max_positions) / (2 * std::numbers::pi * n)) /
           (2 * std::log(rope.theta));
  };
  const double low = std::max(std::floor(find_dim(rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(find_dim(rope.beta_slow)), kRope - 1.0);
  if (low == high) high += 0.001;
  const double mask = 1 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  return plain / rope.factor * (1 - mask) + plain * mask;
}

void expect_table(const RopeSpec& rope, double amplitude) {
  const RopeTable table = rope_table(rope, kRope, positions(300), at::kDouble);
  ASSERT_EQ(table.cos_BSr.sizes(), (std::vector<int64_t>{1, 300, kRope / 2}));
  const Tensor cos = at::empty_like(table.cos_BSr), sin = at::empty_like(cos);
  for (int64_t s = 0; s < 300; ++s) {
    for (int64_t i = 0; i < kRope / 2; ++i) {
      cos[0][s][i] = amplitude * std::cos(static_cast<double>(s) * frequency(rope, i));
      sin[0][s][i] = amplitude * std::sin(static_cast<double>(s) * frequency(rope, i));
    }
  }
  // Angles up to 300 carry 300 times the rounding of a frequency.
  const Tolerance rounding{Tolerance::rounding(at::kDouble, 1, 1).relative_to_norm * 300};
  EXPECT_CLOSE(table.cos_BSr, cos, rounding);
  EXPECT_CLOSE(table.sin_BSr, sin, rounding);
  const RopeTable rounded = rope_table(rope, kRope, positions(300));
  EXPECT_TRUE(rounded.cos_BSr.equal(table.cos_BSr.to(at::kFloat)) &&
              rounded.sin_BSr.equal(table.sin_BSr.to(at::kFloat)));
}

double m(double factor, double scale) { return 0.1 * scale * std::log(factor) + 1; }

TEST(RopeTable, Plain) { expect_table({}, 1.0); }
TEST(RopeTable, YarnWithBothScales) { expect_table(yarn(), m(40, 1.0) / m(40, 0.707)); }

TEST(RopeTable, YarnWithoutScales) {
  RopeSpec rope = yarn();
  rope.mscale.reset();
  rope.mscale_all_dim.reset();
  expect_table(rope, m(40, 1.0));
}

TEST(RopeTable, YarnWithAttentionFactor) {
  RopeSpec rope = yarn();
  rope.attention_factor = 1.25;
  expect_table(rope, 1.25);
}

// Kimi-K2: the ramp is a step, and everything stays finite.
TEST(RopeTable, YarnWithEqualBetas) {
  RopeSpec rope = yarn();
  rope.beta_fast = rope.beta_slow = 1;
  expect_table(rope, m(40, 1.0) / m(40, 0.707));
}

TEST(SoftmaxScale, CarriesYarnsSquareOnceAndOnlyThere) {
  MlaSpec spec;
  spec.dims.d_nope = 128;
  spec.dims.d_rope = 64;
  EXPECT_DOUBLE_EQ(spec.softmax_scale(), 1 / std::sqrt(192.0));
  spec.rope = yarn();
  EXPECT_NEAR(spec.softmax_scale() * std::sqrt(192.0), 1.590, 5e-4);  // V2-Lite
  spec.rope.mscale_all_dim = 1.0;
  EXPECT_NEAR(spec.softmax_scale() * std::sqrt(192.0), 1.874, 5e-4);  // V3
}

// Scores of every query against every key: [S, S].
Tensor scores(const Tensor& q, const Tensor& k, const RopeTable& table) {
  const Tensor q_rotated = rotated(q, table), k_rotated = rotated(k, table);
  return at::einsum("bsnr,btnr->st", {q_rotated.to(at::kDouble), k_rotated.to(at::kDouble)});
}

TEST(Rotate, ScoresDependOnTheDistanceOnly) {
  for (const bool interleaved : {true, false}) {
    RopeSpec rope = yarn();
    rope.interleaved = interleaved;
    const RopeTable table = rope_table(rope, kRope, positions(20), at::kDouble);
    const Tensor q = seeded_normal({1, 1, 1, kRope}, 1, kSeed, "q", at::kDouble).expand({1, 20, 1, kRope});
    const Tensor k = seeded_normal({1, 1, 1, kRope}, 1, kSeed, "k", at::kDouble).expand({1, 20, 1, kRope});
    const Tensor s = scores(q, k, table);
    for (int64_t distance = 0; distance < 20; ++distance) {
      const Tensor diagonal = s.diagonal(-distance);
      EXPECT_CLOSE(diagonal, diagonal[0].expand_as(diagonal), Tolerance::rounding(at::kDouble, kRope, 4)) << distance;
    }
    EXPECT_GT((s.diagonal(0)[0] - s.diagonal(-3)[0]).abs().item<double>(), 1e-3);
  }
}

// Pairs (2i, 2i+1) of a checkpoint are pairs (i, i + R/2) of its reordered columns: the same scores, not the same keys.
TEST(Rotate, HalfSplitIsInterleavedWithReorderedColumns) {
  RopeTable interleaved = rope_table(yarn(), kRope, positions(20), at::kDouble), half_split = interleaved;
  half_split.interleaved = false;
  const auto reorder = [](const Tensor& x) { return x.unflatten(-1, {kRope / 2, 2}).mT().flatten(-2); };
  const Tensor q = seeded_normal({1, 20, 3, kRope}, 1, kSeed, "q", at::kDouble);
  const Tensor k = seeded_normal({1, 20, 3, kRope}, 1, kSeed, "k", at::kDouble);
  EXPECT_CLOSE(scores(reorder(q), reorder(k), half_split), scores(q, k, interleaved),
               Tolerance::rounding(at::kDouble, 3 * kRope, 2));
  EXPECT_FALSE(rotated(reorder(k), half_split).allclose(rotated(k, interleaved)));
}

class EveryDtype : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(EveryDtype, RotatesInFp32AndRoundsOnce) {
  const RopeTable table = rope_table(yarn(), kRope, positions(20));
  const Tensor x = seeded_normal({1, 20, 3, kRope}, 1, kSeed, "x", GetParam());
  const at::ScalarType compute = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor want = rotated(x.to(compute), table).to(GetParam());
  EXPECT_TRUE(rotated(x, table).equal(want));
  const Tensor complex = at::view_as_complex(x.to(at::kDouble).unflatten(-1, {kRope / 2, 2}));
  const Tensor turn = at::complex(table.cos_BSr.to(at::kDouble), table.sin_BSr.to(at::kDouble)).unsqueeze(2);
  EXPECT_CLOSE(rotated(x, table), at::view_as_real(complex * turn).flatten(-2), Tolerance::rounding(GetParam(), 2, 1));
}
INSTANTIATE_TEST_SUITE_P(Rotate, EveryDtype, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Rotate, ReadsColumnsOfAWiderTensor) {
  const RopeTable table = rope_table({}, kRope, positions(5));
  const Tensor wide = seeded_normal({1, 5, 3, 20}, 1, kSeed, "x"), columns = wide.narrow(3, 12, kRope),
               before = wide.clone();
  EXPECT_TRUE(rotated(columns, table).equal(rotated(columns.contiguous(), table)));
  EXPECT_TRUE(wide.equal(before));
  rotate(columns, table, Rotation::kForward);
  EXPECT_TRUE(columns.equal(rotated(before.narrow(3, 12, kRope), table)));
  EXPECT_TRUE(wide.narrow(3, 0, 12).equal(before.narrow(3, 0, 12)));
}

// <R x, y> = <x, R^T y>: what makes the transposed rotation the gradient.
TEST(Rotate, TransposedIsTheAdjoint) {
  for (const bool interleaved : {true, false}) {
    RopeTable table = rope_table(yarn(), kRope, positions(4), at::kDouble);
    table.interleaved = interleaved;
    const Tensor x = seeded_normal({1, 4, 2, kRope}, 1, kSeed, "x", at::kDouble);
    const Tensor y = seeded_normal({1, 4, 2, kRope}, 1, kSeed, "y", at::kDouble);
    const double left = (rotated(x, table) * y).sum().item<double>();
    const double right = (x * rotated(y, table, Rotation::kTransposed)).sum().item<double>();
    EXPECT_NEAR(left, right, 1e-13 * (x.norm() * y.norm()).item<double>());
  }
}

TEST(Rotate, WrongShapesAreNamed) {
  try {
    rotated(at::ones({1, 4, 2, 6}), rope_table({}, kRope, positions(4)));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "rope table: expected shape [1, 4, 3], got [1, 4, 4]");
  }
}

// What it is given lies on a device whose memory it cannot read.
TEST(Rotate, OnAnotherDeviceIsABug) {
  const RopeTable table = rope_table({}, kRope, positions(4));
  const Tensor x = at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                            caffe2::TypeMeta::Make<float>(), c10::Device(at::kCUDA, 0));
  x.unsafeGetTensorImpl()->set_sizes_contiguous({1, 4, 2, kRope});
  EXPECT_THROW(rotate(x, table, Rotation::kForward), InternalError);
}

}  // namespace
}  // namespace parlat
