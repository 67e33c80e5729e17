// The harness of decoding: which cases it times, and how many sequences a memory budget holds.
#include "parlat/bench/decode_bench.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "parlat/base/error.h"
#include "parlat/kernels/decode_attention.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A row of the whole latent takes (32 + 8) elements a layer, one of half of it (16 + 8); in bf16 and 2 layers a page of
// 64 tokens 10,240 and 6,144 bytes.
DecodeBenchOptions small_options(DecodeLayout layout, int64_t groups) {
  DecodeBenchOptions options;
  options.config = load_model_config("tiny");
  options.config.n_layers = 2;
  MlaDims& d = options.config.mla.dims;
  d.d_latent = 32;
  d.d_rope = 8;
  options.layout = {.layout = layout, .groups = groups};
  options.contexts = {130, 64};
  options.batches = {3, 1};
  options.steps = 2;
  return options;
}

RankRunner local(int ranks) {
  return [ranks](const auto& body) { run_ranks(ranks, body); };
}

std::vector<DecodeBenchRow> bench(const DecodeBenchOptions& options, int ranks) {
  return bench_decode(options, local(ranks), [](const std::string&) {});
}

std::vector<int64_t> batches(const std::vector<DecodeBenchRow>& rows) {
  std::vector<int64_t> found;
  for (const DecodeBenchRow& row : rows) found.push_back(row.batch);
  return found;
}

TEST(DecodeBench, CoversTheGridInOrder) {
  const auto rows = bench(small_options(DecodeLayout::kMla, 1), 2);
  ASSERT_THAT(batches(rows), ElementsAre(3, 3, 1, 1));
  for (size_t i = 0; i < rows.size(); ++i) {
    const DecodeBenchRow& row = rows[i];
    EXPECT_EQ(row.context, i % 2 == 0 ? 130 : 64);
    EXPECT_TRUE(row.ok) << row.max_error << " and " << row.step.max_error;
    EXPECT_GT(row.step.max_error, 0);
    EXPECT_LE(row.step.max_error, row.step.tolerance);
    EXPECT_LE(row.ms.min, row.ms.median);
    EXPECT_DOUBLE_EQ(row.tokens_per_s, static_cast<double>(row.batch) / row.ms.median * 1e3);
    EXPECT_EQ(row.cache_bytes_per_token, 2 * 2 * 40);
    // 133 and 67 tokens with the steps' own: 3 and 2 pages.
    EXPECT_EQ(row.cache_bytes, row.batch * (row.context == 130 ? 3 : 2) * 10240);
  }
}

TEST(DecodeBench, ABudgetHoldsAsManySequencesAsItsPages) {
  DecodeBenchOptions options = small_options(DecodeLayout::kMla, 1);
  options.cache_budget = 9 * 10240 + 10239;  // 9 pages: 3 sequences of 3 pages, 9 of one
  EXPECT_THAT(batches(bench(options, 2)), ElementsAre(3, 9));

  options.layout = {.layout = DecodeLayout::kTpla, .groups = 2};  // 16 pages
  const auto sliced = bench(options, 2);
  EXPECT_THAT(batches(sliced), ElementsAre(5, 16));
  EXPECT_EQ(sliced[1].cache_bytes, 16 * 6144);
  EXPECT_TRUE(sliced[0].ok && sliced[1].ok);

  options.layout = {.layout = DecodeLayout::kDcp, .groups = 1};  // 9 pages of every other token: 65 of 130, 32 of 64
  EXPECT_THAT(batches(bench(options, 2)), ElementsAre(4, 9));

  options.cache_budget = 2 * 10240;
  options.layout = {.layout = DecodeLayout::kMla, .groups = 1};
  const auto rows = bench(options, 2);
  EXPECT_THAT(batches(rows), ElementsAre(0, 2));
  EXPECT_EQ(rows[0].tokens_per_s, 0);
  EXPECT_TRUE(rows[0].ok);
}

TEST(DecodeBench, ABudgetHasRoomForTheStepsInEverySequence) {
  DecodeBenchOptions options = small_options(DecodeLayout::kMla, 1);
  options.cache_budget = 1 << 20;
  options.contexts = {64, 3};
  try {
    bench(options, 1);
    ADD_FAILURE() << "not refused";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected more than the 3 tokens that the steps store, got 3"));
  }
}

// Where a backend's own exchange can be called from outside.
struct OpenCommunicator : Communicator {
  using Communicator::do_exchange;
};

// Ranks whose exchanges of one name arrive changed from rank 1, and one of which takes long to end what it did in a
// group.
class Disturbed final : public Communicator {
 public:
  Disturbed(Communicator& inner, std::string what, int late = -1)
      : Communicator(inner.rank(), inner.size(), std::make_shared<Traffic>()),
        inner_(inner),
        what_(std::move(what)),
        late_(inner.rank() == late) {}
  ~Disturbed() override {
    if (owned_ && late_) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  Disturbed(const Disturbed&) = delete;
  Disturbed& operator=(const Disturbed&) = delete;
  std::unique_ptr<Communicator> split(int color) override {
    std::unique_ptr<Communicator> group = inner_.split(color);
    auto disturbed = std::make_unique<Disturbed>(*group, what_, late_ ? group->rank() : -1);
    disturbed->owned_ = std::move(group);
    return disturbed;
  }
  void fail(const std::string& reason) override { inner_.fail(reason); }
  const char* backend() const override { return inner_.backend(); }

 protected:
  Handle do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) override {
    if (what == what_ && rank() == 1) {
      for (Tensor& part : send) part = part.defined() && part.is_floating_point() ? part * 1.5 : part;
    }
    return (inner_.*&OpenCommunicator::do_exchange)(std::move(send), std::move(receive), what);
  }

 private:
  Communicator& inner_;
  std::unique_ptr<Communicator> owned_;
  std::string what_;
  bool late_;
};

TEST(DecodeBench, TimesNothingAfterStepsThatAreNotTheLayouts) {
  using enum DecodeLayout;
  for (const auto& [layout, what] : {std::pair{LayoutSpec{kMla, 1}, "decode attention"},
                                     {LayoutSpec{kTpla, 2}, "decode attention"},
                                     {LayoutSpec{kDcp, 1}, "decode queries"},
                                     {LayoutSpec{kDcp, 1}, "decode partial results"},
                                     {LayoutSpec{kDcp, 1}, "decode logits"}}) {
    SCOPED_TRACE(what);
    const RankRunner disturbed = [what = what](const auto& body) {
      run_ranks(2, [&](Communicator& comm) {
        Disturbed with(comm, what);
        body(with);
      });
    };
    const auto rows = bench_decode(small_options(layout.layout, layout.groups), disturbed, [](const std::string&) {});
    ASSERT_THAT(batches(rows), ElementsAre(3, 3, 1, 1));
    for (const DecodeBenchRow& row : rows) {
      EXPECT_FALSE(row.ok);
      EXPECT_GT(row.step.max_error, row.step.tolerance);
      EXPECT_EQ(row.tokens_per_s, 0);
      EXPECT_EQ(row.ms.median, 0);
    }
  }
}

// Three ranks have 3, 3 and 2 of 8 heads, slices of 11, 11 and 10 columns, and shares of tokens and vocabulary that
// differ.
TEST(DecodeBench, FiguresAreThoseOfTheRankWithMostWhicheverEndsLast) {
  using enum DecodeLayout;
  for (const LayoutSpec& layout : {LayoutSpec{kMla, 1}, LayoutSpec{kTpla, 3}, LayoutSpec{kDcp, 1}}) {
    const DecodeBenchOptions options = small_options(layout.layout, layout.groups);
    ASSERT_EQ(options.config.mla.dims.n_heads, 8);
    const auto figures = [&](int late) {
      const RankRunner runner = [late](const auto& body) {
        run_ranks(3, [&](Communicator& comm) {
          Disturbed with(comm, "", late);
          body(with);
        });
      };
      std::vector<std::vector<double>> found;
      for (const DecodeBenchRow& row : bench_decode(options, runner, [](const std::string&) {})) {
        const auto in_a_step = [&](double giga_per_s) { return std::round(giga_per_s * row.ms.median * 1e6); };
        found.push_back({static_cast<double>(row.sent_bytes), row.cache_bytes_per_token, in_a_step(row.cache_gb_per_s),
                         in_a_step(row.attention_gflops)});
      }
      return found;
    };
    const auto first = figures(0);
    EXPECT_EQ(first, figures(2)) << name(layout.layout);
    const double width = layout.layout == kTpla ? 11 : 32, tokens = layout.layout == kDcp ? 44 : 130;
    EXPECT_EQ(first[0][1], 2 * 2 * (width + 8) / (layout.layout == kDcp ? 3 : 1)) << name(layout.layout);
    EXPECT_EQ(first[0][2], 3 * tokens * 2 * 2 * (width + 8)) << name(layout.layout);
    EXPECT_EQ(first[0][3], 2 * 3 * tokens * 2 * (layout.layout == kMla ? 3 : 8) * (2 * width + 8))
        << name(layout.layout);
  }
}

}  // namespace
}  // namespace parlat
