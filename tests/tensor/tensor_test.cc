// Shapes, seeded values, comparison and the memory meter.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <thread>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/tensor/meta_device.h"
#include "tests/expect_close.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

TEST(Shape, MismatchNamesBothShapes) {
  const Tensor x = at::zeros({2, 3, 47});
  check_shape(x, {2, kAny, 47}, "x");
  try {
    check_shape(x, {2, kAny, 48}, "x");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "x: expected shape [2, *, 48], got [2, 3, 47]");
    EXPECT_EQ(error.exit_code(), 2);
  }
  EXPECT_THROW(check_shape(Tensor(), {1}, "x"), ConfigError);
}

TEST(Shape, DtypeNamesRoundTrip) {
  for (const char* text : {"fp32", "bf16", "fp16", "fp64"}) EXPECT_EQ(name(parse_dtype(text)), text);
  EXPECT_THROW(parse_dtype("float"), ConfigError);
}

TEST(Fill, DependsOnSeedAndNameOnly) {
  const Tensor a = seeded_normal({64, 8}, 0.5, 1, "a");
  EXPECT_TRUE(a.equal(seeded_normal({64, 8}, 0.5, 1, "a")));
  EXPECT_FALSE(a.equal(seeded_normal({64, 8}, 0.5, 1, "b")));
  EXPECT_FALSE(a.equal(seeded_normal({64, 8}, 0.5, 2, "a")));
  EXPECT_NEAR(a.std().item<double>(), 0.5, 0.1);
  const Tensor n = seeded_integers({1000}, 7, 1, "n");
  EXPECT_EQ(n.min().item<int64_t>(), 0);
  EXPECT_EQ(n.max().item<int64_t>(), 6);
}

TEST(Compare, FindsTheWorstElement) {
  const Tensor want = at::ones({2, 3});
  Tensor got = want.clone();
  const Tolerance tolerance = Tolerance::rounding(at::kFloat, 1, 1);
  EXPECT_TRUE(compare(got, want, tolerance).close);
  got[1][2] = 1.5;
  const Comparison result = compare(got, want, tolerance);
  EXPECT_FALSE(result.close);
  EXPECT_DOUBLE_EQ(result.max_error, 0.5);
  EXPECT_THAT(result.worst, HasSubstr("[1, 2]: got 1.5, want 1"));
}

TEST(Compare, NanFailsUnlessInBoth) {
  const Tensor want = at::ones({3});
  Tensor got = want.clone();
  got[0] = NAN;
  EXPECT_FALSE(compare(got, want, {1e9}).close);
  EXPECT_TRUE(compare(got, got, {0.0}).close);
  EXPECT_TRUE(compare(at::full({2}, -INFINITY), at::full({2}, -INFINITY), {0.0}).close);
}

// Where only the largest element counts, a small row may be anything.
TEST(Compare, ARowIsMeasuredAgainstItself) {
  const Tolerance tolerance = Tolerance::rounding(at::kBFloat16, 2048, 12);
  const Tensor want = seeded_normal({64, 32}, 1.0, 1, "want", at::kDouble);
  want[7].mul_(0.05);
  Tensor got = want.to(at::kBFloat16);
  EXPECT_TRUE(compare(got, want, tolerance).close) << compare(got, want, tolerance).text();
  for (const double factor : {0.0, 0.8}) {
    got[7].copy_(factor * want[7]);
    const Comparison result = compare(got, want, tolerance);
    EXPECT_FALSE(result.close) << result.text();
    EXPECT_LT(result.max_error, result.allowed);
    EXPECT_NEAR(result.row_error, (1 - factor) * 0.05 / 0.1, 0.15) << "of a tenth of the tensor's RMS";
  }
}

TEST(Compare, APartIsMeasuredAgainstTheWhole) {
  const Tensor whole = at::cat({at::full({16}, 1e-6), at::ones({16})}).view({2, 16});
  const Tensor got = whole.clone();
  got[0] += 1e-5;
  EXPECT_FALSE(compare(got[0], whole[0], {1e-3}).close);
  EXPECT_TRUE(compare(got[0], whole[0], {1e-3}, scale_of(whole)).close);
  EXPECT_FALSE(compare(got[0], whole[0], {1e-5}, scale_of(whole)).close);
}

TEST(Compare, NothingAndZerosAreCloseToThemselves) {
  EXPECT_TRUE(compare(at::ones({0, 3}), at::ones({0, 3}), {0.0}).close);
  EXPECT_TRUE(compare(at::zeros({2, 3}), at::zeros({2, 3}), {0.0}).close);
  EXPECT_FALSE(compare(at::full({2, 3}, 1e-30), at::zeros({2, 3}), {1.0}).close);
}

TEST(Compare, DifferentShapesAreABug) { EXPECT_THROW(compare(at::ones({2}), at::ones({3}), {1}), InternalError); }

TEST(MemoryMeter, CountsPeakAndCurrent) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  Tensor a = at::empty({1000}, at::kFloat);
  { const Tensor b = at::empty({500}, at::kFloat); }
  EXPECT_EQ(meter.current_bytes(), 4000);
  EXPECT_EQ(meter.peak_bytes(), 6000);
  meter.reset();
  EXPECT_EQ(meter.peak_bytes(), 0);
}

TEST(MemoryMeter, EachThreadHasItsOwn) {
  MemoryMeter mine, other;
  const MemoryMeter::Scope scope(mine);
  std::thread([&] {
    const MemoryMeter::Scope its_scope(other);
    at::empty({256}, at::kFloat);
  }).join();
  EXPECT_EQ(mine.peak_bytes(), 0);
  EXPECT_EQ(other.peak_bytes(), 1024);
}

TEST(MemoryMeter, SeesTheBackwardPass) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  Tensor x = at::ones({1000}).requires_grad_();
  const Tensor y = (x * x).sum();
  meter.reset();
  y.backward();
  EXPECT_GE(meter.peak_bytes(), 4000);
}

std::vector<std::pair<std::string, int64_t>> sites(const MemoryMeter& meter) {
  std::vector<std::pair<std::string, int64_t>> pairs;
  for (const MemoryMeter::Site& site : meter.peak_sites()) pairs.emplace_back(site.name, site.bytes);
  return pairs;
}

TEST(MemoryMeter, SaysWhatThePeakConsistsOf) {
  MemoryMeter meter(/*with_sites=*/true);
  const MemoryMeter::Scope scope(meter);
  const Tensor a = metered("a", at::empty({100}, at::kFloat));
  { const Tensor freed = metered("freed", at::empty({10}, at::kFloat)); }
  const Tensor more = metered("a", at::empty({50}, at::kFloat)), late = at::empty({200}, at::kFloat);
  { const Tensor unnamed = at::empty({30}, at::kFloat); }  // the peak
  metered("late", late.view({20, 10}));                    // was part of it
  const Tensor after = metered("after", at::empty({20}, at::kFloat));
  metered("small", more);
  EXPECT_THAT(sites(meter), ::testing::ElementsAre(std::pair("late", 800), std::pair("a", 400), std::pair("small", 200),
                                                   std::pair("unnamed", 120)));
  EXPECT_EQ(meter.peak_bytes(), 1520);
  meter.reset();
  EXPECT_TRUE(meter.peak_sites().empty());
}

TEST(MemoryMeter, NamesNothingUnlessAsked) {
  const Tensor unmetered = metered("a", at::empty({4}));
  EXPECT_EQ(metered("none", Tensor()).defined(), false);
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  metered("a", unmetered);
  EXPECT_TRUE(metered("b", at::empty({4})).defined());
  EXPECT_TRUE(meter.peak_sites().empty());
}

// Shapes alone: 8 TB.
TEST(MetaDevice, CountsWhatTheCpuWould) {
  prepare_meta_device();
  MemoryMeter meter(/*with_sites=*/true);
  const MemoryMeter::Scope scope(meter);
  {
    const Tensor a = metered("a", at::empty({1 << 20, 1 << 20}, at::TensorOptions(at::kMeta).dtype(at::kFloat)));
    const Tensor view = a.narrow(0, 5, 1 << 19), wide = metered("wide", view.to(at::kDouble));
    const Tensor none = at::empty({0, 4}, a.options());
    wide.zero_();
    EXPECT_EQ(meter.current_bytes(), (int64_t{4} << 40) + (int64_t{4} << 40));
  }
  EXPECT_EQ(meter.current_bytes(), 0);
  EXPECT_THAT(sites(meter),
              ::testing::ElementsAre(std::pair("a", int64_t{4} << 40), std::pair("wide", int64_t{4} << 40)));
}

TEST(MetaDevice, HasTheOperationsOfEmbeddings) {
  prepare_meta_device();
  const at::TensorOptions shape_only = at::TensorOptions(at::kMeta).dtype(at::kBFloat16);
  const Tensor index = at::empty({2, 3}, shape_only.dtype(at::kLong));
  EXPECT_EQ(at::embedding(at::empty({7, 5}, shape_only), index).sizes(), (std::vector<int64_t>{2, 3, 5}));
  const Tensor grad = at::embedding_dense_backward(at::empty({2, 3, 5}, shape_only), index, 7, -1, false);
  EXPECT_EQ(grad.sizes(), (std::vector<int64_t>{7, 5}));
  EXPECT_EQ(grad.scalar_type(), at::kBFloat16);
}

}  // namespace
}  // namespace parlat
