// The dry run against the meter of a real one, and the tables of the LAGA paper by it.
#include <gmock/gmock.h>

#include <fstream>
#include <string>

#include "parlat/base/error.h"
#include "parlat/bench/attention_bench.h"
#include "parlat/kernels/bf16_product.h"
#include "parlat/train/step_record.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

RankRunner local(int ranks) {
  return [ranks](const auto& body) { run_ranks(ranks, body); };
}

AttentionBenchOptions small_options() {
  AttentionBenchOptions options;
  MlaDims& d = options.spec.dims;
  d.d_model = 256;
  d.n_heads = 8;
  d.d_nope = 32;
  d.d_rope = 16;
  d.d_v = 32;
  d.d_latent = 128;
  d.d_q_latent = 96;
  options.sequences = {768};
  options.repeats = 1;
  options.verify_sequence = 16;
  return options;
}

std::vector<AttentionBenchRow> bench(AttentionBenchOptions options, int ranks, bool dry_run) {
  options.forms = possible_train_forms(options.spec.dims.d_q_latent.has_value(), options.attention.kernel);
  options.dry_run = dry_run;
  return bench_attention(options, local(ranks));
}

int64_t sum_of(const std::vector<MemoryMeter::Site>& sites) {
  int64_t sum = 0;
  for (const MemoryMeter::Site& site : sites) sum += site.bytes;
  return sum;
}

std::map<std::string, int64_t> by_name(const std::vector<MemoryMeter::Site>& sites) {
  std::map<std::string, int64_t> bytes;
  for (const MemoryMeter::Site& site : sites) bytes[site.name] = site.bytes;
  return bytes;
}

// What torch's own products take as scratch in a real run: its oneDNN, a block of 64 KB at most for these sizes.
int64_t library_scratch(at::ScalarType dtype) { return dtype == at::kBFloat16 && native_bf16_gemm() ? 64 << 10 : 0; }

constexpr AttentionOptions kEager{AttentionKernel::kEager}, kSaveAll{.save = SavedKeys::kAll};

TEST(DryRun, PredictsPeaksWithinOnePercentAndBytesExactly) {
  for (const AttentionOptions& attention : {AttentionOptions{}, kSaveAll, kEager}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int ranks : {1, 4}) {
        AttentionBenchOptions options = small_options();
        options.attention = attention;
        options.dtype = dtype;
        options.sharding = ranks == 4 ? Sharding::kZigzag : Sharding::kContiguous;
        const auto measured = bench(options, ranks, false), dry = bench(options, ranks, true);
        ASSERT_EQ(measured.size(), dry.size());
        for (size_t i = 0; i < dry.size(); ++i) {
          SCOPED_TRACE(fmt::format("{}, kernel {}, save {}, {}, {} ranks", name(dry[i].form), name(attention.kernel),
                                   name(attention.save), name(dtype), ranks));
          const auto peak = static_cast<double>(measured[i].peak_activation_bytes);
          EXPECT_NEAR(static_cast<double>(dry[i].peak_activation_bytes), peak,
                      0.01 * peak + static_cast<double>(library_scratch(dtype)));
          EXPECT_EQ(to_json(dry[i].sent), to_json(measured[i].sent));
          EXPECT_EQ(to_json(dry[i].sent_forward), to_json(measured[i].sent_forward));
          EXPECT_EQ(dry[i].paper_bytes, measured[i].paper_bytes);
          for (const AttentionBenchRow* row : {&measured[i], &dry[i]}) {
            EXPECT_EQ(sum_of(row->peak_sites), row->peak_activation_bytes);
            EXPECT_LT(static_cast<double>(by_name(row->peak_sites)["unnamed"]), 0.05 * peak);
          }
        }
      }
    }
  }
}

TEST(DryRun, PredictsForwardPassesAndUnevenRanks) {
  AttentionBenchOptions options = small_options();
  options.backward = false;
  options.spec.dims.n_heads = 7;
  options.sequences = {701};
  options.documents = 3;
  options.batch = 2;
  const auto measured = bench(options, 3, false), dry = bench(options, 3, true);
  for (size_t i = 0; i < dry.size(); ++i) {
    const auto peak = static_cast<double>(measured[i].peak_activation_bytes);
    EXPECT_NEAR(static_cast<double>(dry[i].peak_activation_bytes), peak, 0.01 * peak) << name(dry[i].form);
    EXPECT_EQ(to_json(dry[i].sent), to_json(measured[i].sent)) << name(dry[i].form);
  }
}

AttentionBenchOptions v3_options(std::vector<int64_t> sequences) {
  AttentionBenchOptions options;
  options.spec = load_model_config("v3").mla;
  options.forms = {TrainForm::kExplicit, TrainForm::kAbsorbed, TrainForm::kLaga};
  options.sequences = std::move(sequences);
  options.dtype = at::kBFloat16;
  options.dry_run = true;
  return options;
}

// What this process has had in memory at most, since the peak was last reset.
int64_t resident_peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) << 10;
  }
  return 0;
}
void reset_resident_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

TEST(DryRun, OfDeepSeekV3TakesNoMemory) {
  reset_resident_peak();  // that of other tests would hide this one's
  const int64_t before = resident_peak_bytes();
  AttentionBenchOptions options = v3_options({16384});
  options.attention = kEager;
  const auto rows = bench_attention(options, local(8));
  EXPECT_GT(before, 0);
  EXPECT_LT(resident_peak_bytes() - before, 256 << 20);
  const int64_t scores = int64_t{16} * 16384 * 16384 * 2;
  for (const AttentionBenchRow& row : rows) {
    EXPECT_GT(row.peak_activation_bytes, scores);
    EXPECT_EQ(by_name(row.peak_sites)["probabilities"], scores) << name(row.form);
  }
  for (const char* site : {"absorbed query", "query", "latent"}) {
    EXPECT_GT(by_name(rows[1].peak_sites)[site], 0) << site;
  }
  EXPECT_GT(by_name(rows[0].peak_sites)["key"], 0);
  EXPECT_EQ(to_json(rows[0], options)["peak_sites"]["probabilities"], scores);
  EXPECT_EQ(to_json(rows[0], options)["dry_run"], true);
}

// What laga takes beyond explicit, by the rank count and the sequence.
template <typename Check>
void for_each_cell(const AttentionOptions& attention, const Check& check) {
  for (const int ranks : {4, 8}) {
    AttentionBenchOptions options = v3_options({4096, 8192, 16384});
    options.attention = attention;
    const auto rows = bench_attention(options, local(ranks));
    for (size_t i = 0; i < rows.size(); i += 3) {
      SCOPED_TRACE(fmt::format("{} ranks, {} tokens", ranks, rows[i].sequence));
      check(rows[i], rows[i + 2].peak_activation_bytes - rows[i].peak_activation_bytes);
    }
  }
}

// The latent of the other ranks' tokens is all that laga has more. Beside scores it hardly shows.
TEST(DryRun, LagaThatSavesAllHasTheGatheredLatentMore) {
  for (const AttentionOptions& attention : {kEager, kSaveAll}) {
    for_each_cell(attention, [&](const AttentionBenchRow& row, int64_t excess) {
      EXPECT_EQ(excess, row.sequence * (row.ranks - 1) / row.ranks * (512 + 64) * 2);
      if (attention.kernel == AttentionKernel::kFused) return;
      EXPECT_LT(static_cast<double>(excess), 0.006 * static_cast<double>(row.peak_activation_bytes));
    });
  }
}

TEST(DryRun, FusedLagaThatSavesLatentsPeaksLower) {
  for_each_cell({}, [](const AttentionBenchRow& row, int64_t excess) {
    EXPECT_LT(static_cast<double>(excess), -0.1 * static_cast<double>(row.peak_activation_bytes));
  });
}

// A dry run has no values, but positions.
TEST(DryRun, RefusesMoreTokensThanThereIsMemoryForPositions) {
  AttentionBenchOptions options = small_options();
  options.sequences = {int64_t{1} << 44};
  try {
    bench(options, 2, /*dry_run=*/true);
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::StartsWith("sequence: expected the positions of all tokens to fit in "));
  }
}

}  // namespace
}  // namespace parlat
