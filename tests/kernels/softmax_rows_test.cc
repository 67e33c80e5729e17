// One row of scores at a time, against fp64.
#include "parlat/kernels/softmax_rows.h"

#include <c10/util/BFloat16.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/kernels/instruction_sets.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"

namespace parlat {
namespace {

template <typename T>
constexpr at::ScalarType kDtype = c10::CppTypeToScalarType<T>::value;

template <typename T>
class SoftmaxRow : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(SoftmaxRow, Types);

TYPED_TEST(SoftmaxRow, OfEveryIntervalAndLength) {
  for (const int64_t n : {1, 2, 31, 32, 33, 64, 100, 1000}) {
    for (const Range inside : {Range{0, n}, Range{0, n / 2}, Range{n / 3, n}, Range{n / 2, n / 2}}) {
      const at::Tensor row = seeded_normal({n}, 10, 1, "row", kDtype<TypeParam>), want = at::zeros({n}, at::kDouble);
      want.slice(0, inside.begin, inside.end).copy_(row.slice(0, inside.begin, inside.end).to(at::kDouble).softmax(0));
      softmax_row(row.mutable_data_ptr<TypeParam>(), n, inside);
      // The difference to the maximum, exp and the sum.
      EXPECT_CLOSE(row, want, Tolerance::rounding(kDtype<TypeParam>, n, 3)) << n;
    }
  }
}

// Of a row {0, x}: the ratio is exp(x) whatever the sum is.
TYPED_TEST(SoftmaxRow, ExpOverItsWholeRange) {
  for (int64_t i = 0; i <= 4096; ++i) {
    const auto x = static_cast<TypeParam>(-87.0 * static_cast<double>(i) / 4096);
    TypeParam row[2] = {0, x};
    softmax_row(row, 2, {0, 2});
    const double want = std::exp(static_cast<double>(x));
    EXPECT_NEAR(static_cast<double>(row[1]) / static_cast<double>(row[0]), want,
                want * (sizeof(TypeParam) == 4 ? 2e-7 : 1e-15))
        << x;
  }
}

TYPED_TEST(SoftmaxRow, FarBelowTheMaximumIsZero) {
  TypeParam row[3] = {0, -1000, -INFINITY};
  softmax_row(row, 3, {0, 3});
  EXPECT_EQ(row[0], 1);
  EXPECT_EQ(row[1], 0);
  EXPECT_EQ(row[2], 0);
}

TYPED_TEST(SoftmaxRow, PoisonStaysInside) {
  for (const double poison : {double{NAN}, double{-NAN}, double{INFINITY}}) {
    TypeParam row[50];
    std::fill(row, row + 50, TypeParam(1));
    row[20] = static_cast<TypeParam>(poison);
    softmax_row(row, 50, {10, 40});
    for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(std::isnan(row[i]), 10 <= i && i < 40) << i;
  }
}

TYPED_TEST(SoftmaxRow, Gradient) {
  for (const int64_t n : {1, 31, 32, 100}) {
    const at::Tensor p = seeded_normal({n}, 1, 1, "p").softmax(0).to(kDtype<TypeParam>);
    const at::Tensor grad = seeded_normal({n}, 1, 1, "grad", kDtype<TypeParam>);
    const at::Tensor p64 = p.to(at::kDouble), grad64 = grad.to(at::kDouble);
    const at::Tensor want = p64 * (grad64 - (p64 * grad64).sum()) * 0.25, scale = (p64 * grad64).abs().max();
    softmax_row_backward(p.const_data_ptr<TypeParam>(), grad.mutable_data_ptr<TypeParam>(), n, 0.25);
    // With one key the difference cancels: errors are relative to its terms.
    EXPECT_CLOSE(at::cat({grad.to(at::kDouble), scale.view(1)}), at::cat({want, scale.view(1)}),
                 Tolerance::rounding(kDtype<TypeParam>, n, 2));
  }
}

class SoftmaxRows : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_instruction_set(GetParam()); }
  void TearDown() override { force_instruction_set(""); }
};

// Shows as soon as the version for one instruction set fuses multiply-adds or sums in another order.
TEST_P(SoftmaxRows, GiveTheSameBitsOnEveryInstructionSet) {
  constexpr int64_t kSize = 1003;
  constexpr Range kInside{2, kSize - 3};
  std::vector<float> scores(kSize), score_grad(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    scores[i] = static_cast<float>(i * 7919 % 2003) / 64 - 20;
    score_grad[i] = static_cast<float>(i * 104729 % 1009) / 128 - 4;
  }
  const auto hash = [](std::initializer_list<const std::vector<float>*> all) {
    uint64_t hash = 1469598103934665603u;  // FNV-1a
    for (const auto* values : all) {
      for (const float value : *values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 1099511628211u;
    }
    return hash;
  };
  std::vector<float> p = scores, grad = score_grad;
  softmax_row(p.data(), kSize, kInside);
  softmax_row_backward(p.data(), grad.data(), kSize, 0.0721f);
  EXPECT_EQ(hash({&p, &grad}), 0xf4dfd06d0675cebeu);

  // A block that joins others, then the same backward, as a part of a row and as a whole one.
  std::vector<float> joined = scores;
  RunningSoftmax<float> so_far{.max = -3.5f, .sum = 1.25f, .weight = 1.25f};
  const float shrink = join_softmax_row(joined.data(), kSize, kInside, so_far);
  std::vector<float> sums = {so_far.max, so_far.sum, shrink};
  EXPECT_EQ(so_far.weight, so_far.sum);
  EXPECT_EQ(hash({&joined, &sums}), 0xb0d63c3781c9ea9au);
  for (const auto& [whole, want] :
       {std::pair{false, uint64_t{0x47dd854e499eb81bu}}, {true, uint64_t{0xe799e2efefedfcf9u}}}) {
    std::vector<float> regained = scores, regained_grad = score_grad;
    regain_softmax_row(regained.data(), regained_grad.data(), kSize, kInside, whole, 14.5f, 0.375f, 0.0721f);
    EXPECT_EQ(hash({&regained, &regained_grad}), want) << whole;
  }
}

uint16_t bf16_bits(float x) { return c10::BFloat16(x).x; }

TEST_P(SoftmaxRows, RoundsToBf16BeforeValuesAreWeighted) {
  constexpr int64_t kSize = 203;
  constexpr Range kInside{5, 198};
  std::vector<float> exact(kSize);
  for (int64_t i = 0; i < kSize; ++i) exact[i] = static_cast<float>((i * 37) % 101) * 0.07f - 3;
  std::vector<float> rounded = exact;
  RunningSoftmax<float> want, got;
  std::vector<uint16_t> bf16(kSize, 1);
  EXPECT_EQ(join_softmax_row(exact.data(), kSize, kInside, want),
            join_softmax_row(rounded.data(), kSize, kInside, got, bf16.data()));
  double weight = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    EXPECT_EQ(bf16[i], bf16_bits(exact[i])) << i;
    EXPECT_EQ(rounded[i], static_cast<float>(c10::BFloat16(exact[i]))) << i;
    weight += rounded[i];
  }
  EXPECT_EQ(got.max, want.max);
  EXPECT_EQ(got.sum, want.sum);
  EXPECT_NE(got.weight, got.sum);
  EXPECT_NEAR(got.weight, weight, 1e-6 * weight);
}

TEST_P(SoftmaxRows, RoundsGradientsToBf16InTheEnd) {
  constexpr int64_t kSize = 203;
  std::vector<float> p(kSize), grad(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    p[i] = static_cast<float>((i * 37) % 101) * 0.07f - 3;
    grad[i] = static_cast<float>((i * 53) % 89) * 0.3f - 11;
  }
  grad[17] = std::numeric_limits<float>::infinity();
  grad[18] = std::bit_cast<float>(0xffffffffu);  // a NaN that rounding would carry over into a number
  std::vector<uint16_t> p_bf16(kSize), grad_bf16(kSize);
  regain_softmax_row(p.data(), grad.data(), kSize, {5, 198}, false, 5.5f, 0.375f, 0.0721f, p_bf16.data(),
                     grad_bf16.data());
  for (int64_t i = 0; i < kSize; ++i) {
    EXPECT_EQ(p_bf16[i], bf16_bits(p[i])) << i;
    if (i == 18) {
      EXPECT_TRUE(std::isnan(std::bit_cast<float>(uint32_t{grad_bf16[i]} << 16)));
    } else {
      EXPECT_EQ(grad_bf16[i], bf16_bits(grad[i])) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(This, SoftmaxRows, ::testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return info.param; });

TEST(InstructionSets, OneThatIsMissingIsRefused) {
  const std::vector<std::string> sets = instruction_sets();
  EXPECT_EQ(sets.back(), "portable");
  try {
    force_instruction_set("avx1024");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), fmt::format("PARLAT_ISA: expected one of {}, got 'avx1024'", fmt::join(sets, ", ")));
  }
}

}  // namespace
}  // namespace parlat
