// The collectives' benchmark: a row of every collective and size, the same on all ranks, with the bytes really sent.
#include "parlat/bench/comm_bench.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

TEST(CommBench, RowsAreAlikeOnAllRanksAndCountWhatIsSent) {
  std::vector<std::vector<nlohmann::json>> rows(3);
  run_ranks(3, [&](Communicator& comm) { rows[comm.rank()] = bench_comm(comm, {.bytes = {4, 1200}, .repeats = 3}); });
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_EQ(rows[0], rows[2]);
  ASSERT_EQ(rows[0].size(), 12);
  const std::map<std::string, int64_t> sent = {{"all_to_all", 800},  {"all_gather", 2400}, {"reduce_scatter", 800},
                                               {"all_reduce", 1600}, {"send_recv", 1200},  {"broadcast", 2400}};
  for (const nlohmann::json& row : rows[0]) {
    EXPECT_EQ(row["backend"], "local");
    EXPECT_EQ(row["ranks"], 3);
    EXPECT_GT(row["ms"]["min"], 0);
    EXPECT_LE(row["ms"]["min"], row["ms"]["median"]);
    EXPECT_LE(row["ms"]["median"], row["ms"]["p90"]);
    EXPECT_GT(row["gbytes_per_s"], 0);
    if (row["bytes"] == 1200) {
      EXPECT_EQ(row["sent_bytes"], sent.at(row["collective"])) << row;
    }
  }
}

TEST(CommBench, OneRankSendsNothing) {
  run_ranks(1, [](Communicator& comm) {
    for (const nlohmann::json& row : bench_comm(comm, {.bytes = {64}, .repeats = 1})) EXPECT_EQ(row["sent_bytes"], 0);
  });
}

TEST(CommBench, RefusesWhatItCannotMeasure) {
  run_ranks(1, [](Communicator& comm) {
    EXPECT_THROW(bench_comm(comm, {.bytes = {3}, .repeats = 1}), ConfigError);
    EXPECT_THROW(bench_comm(comm, {.bytes = {4}, .repeats = 0}), ConfigError);
  });
}

}  // namespace
}  // namespace parlat
