// A rank that fails, disagrees or stays away ends every other rank with a message that names it.
#include <gmock/gmock.h>

#include <mutex>
#include <thread>

#include "tests/comm/cases.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr CommOptions kLong{.timeout = std::chrono::seconds(60)};
constexpr CommOptions kShort{.timeout = std::chrono::milliseconds(300)};

struct Outcome {
  std::string error;               // what run_local_ranks rethrew
  std::vector<std::string> ranks;  // what each rank saw
  double seconds = 0;
};

Outcome run_and_catch(int ranks, CommOptions options, const std::function<void(Communicator&)>& body) {
  Outcome outcome;
  outcome.ranks.resize(ranks);
  const auto start = std::chrono::steady_clock::now();
  try {
    run_local_ranks(
        ranks,
        [&](Communicator& comm) {
          try {
            body(comm);
          } catch (const std::exception& error) {
            outcome.ranks[comm.rank()] = error.what();
            throw;
          }
        },
        1, options);
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

TEST(Faults, ThrowingRankIsNamedByAllAndItsErrorRethrown) {
  const Outcome outcome = run_and_catch(4, kLong, [](Communicator& comm) {
    comm.barrier("start");
    if (comm.rank() == 2) throw DataError("novel.txt: broken");
    comm.all_reduce(at::ones({10}), "gradients").wait();
  });
  EXPECT_EQ(outcome.error, "novel.txt: broken");
  for (const int rank : {0, 1, 3}) EXPECT_EQ(outcome.ranks[rank], "gradients: rank 2 failed: novel.txt: broken");
  EXPECT_LT(outcome.seconds, 10);
}

TEST(Faults, KeepTheTypeOfTheError) {
  EXPECT_THROW(run_local_ranks(3,
                               [](Communicator& comm) {
                                 if (comm.rank() == 1) throw DataError("x");
                                 comm.barrier("y");
                               }),
               DataError);
}

TEST(Faults, DifferentExchangesNameBoth) {
  const Outcome outcome = run_and_catch(
      2, kLong, [](Communicator& comm) { comm.barrier(comm.rank() == 0 ? "laga query" : "laga latent"); });
  EXPECT_THAT(outcome.error, AllOf(HasSubstr("rank 0 is in 'laga query'"), HasSubstr("rank 1 is in 'laga latent'")));
  for (const std::string& seen : outcome.ranks) EXPECT_THAT(seen, HasSubstr("'laga latent'"));
}

TEST(Faults, DifferentSizesNameBoth) {
  const Outcome outcome = run_and_catch(
      3, kLong, [](Communicator& comm) { comm.broadcast(at::ones({comm.rank() == 2 ? 5 : 4}), 0, "weights").wait(); });
  EXPECT_THAT(outcome.error, HasSubstr("weights: rank 0 sends 16 bytes to rank 2, which expects 20"));
}

TEST(Faults, SizesThatDifferFromNothingNameBoth) {
  for (const int64_t sent : {0, 4}) {
    const Outcome outcome = run_and_catch(2, kLong, [sent](Communicator& comm) {
      std::vector<Tensor> send(2, at::ones({0})), receive(2, at::ones({0}));
      if (comm.rank() == 0) send[1] = at::ones({sent});
      if (comm.rank() == 1) receive[0] = at::ones({4 - sent});
      comm.all_to_all(send, receive, "rows").wait();
    });
    EXPECT_THAT(outcome.error,
                HasSubstr(fmt::format("rank 0 sends {} bytes to rank 1, which expects {}", 4 * sent, 16 - 4 * sent)));
  }
}

TEST(Faults, SwappedOrderOnOneRankEnds) {
  const Outcome outcome = run_and_catch(3, kLong, [](Communicator& comm) {
    const auto gather = [&](const char* what) {
      std::vector<Tensor> receive;
      for (int p = 0; p < comm.size(); ++p) receive.push_back(at::ones({4}));
      return comm.all_gather(at::ones({4}), receive, what);
    };
    Handle first = gather(comm.rank() == 1 ? "b" : "a");
    Handle second = gather(comm.rank() == 1 ? "a" : "b");
    first.wait();
    second.wait();
  });
  EXPECT_THAT(outcome.error, AllOf(HasSubstr("rank 1"), HasSubstr("'a'"), HasSubstr("'b'")));
  EXPECT_LT(outcome.seconds, 10);
}

TEST(Faults, AbsentRankIsNamedAfterTheTimeout) {
  const Outcome outcome = run_and_catch(3, kShort, [](Communicator& comm) {
    comm.barrier("start");
    if (comm.rank() == 1) return;
    comm.all_reduce(at::ones({10}), "gradients").wait();
  });
  EXPECT_EQ(outcome.error, "gradients: no answer from rank 1 within 0.3 s");
  EXPECT_GE(outcome.seconds, 0.3);
  EXPECT_LT(outcome.seconds, 5);
}

TEST(Faults, LateRankLearnsThatTheOthersGaveUp) {
  const Outcome outcome = run_and_catch(3, kShort, [](Communicator& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
    comm.barrier("start");
  });
  EXPECT_EQ(outcome.error, "start: no answer from rank 1 within 0.3 s");
  EXPECT_THAT(outcome.ranks[1], AllOf(HasSubstr("failed: start: no answer from rank 1")));
}

TEST(Faults, CrossGroups) {
  const Outcome outcome = run_and_catch(4, kLong, [](Communicator& comm) {
    const auto column = comm.split(comm.rank() / 2);
    if (comm.rank() == 3) throw DataError("broken");
    if (comm.rank() == 2) column->barrier("column");
    if (comm.rank() < 2) {
      column->barrier("column");
      comm.barrier("all");
    }
  });
  EXPECT_EQ(outcome.error, "broken");
  EXPECT_EQ(outcome.ranks[2], "column: rank 3 failed: broken");
  EXPECT_THAT(outcome.ranks[0], HasSubstr("rank 3 failed: broken"));
}

TEST(Faults, GroupsNameTheRanksOfTheWorld) {
  const Outcome outcome = run_and_catch(4, kShort, [](Communicator& comm) {
    const auto column = comm.split(comm.rank() / 2);
    if (comm.rank() == 2) column->barrier("column");
  });
  EXPECT_EQ(outcome.error, "column: no answer from rank 3 within 0.3 s");
}

// Buffers of a rank that gives up are not touched after it has: run under the address sanitizer this test fails if they
// are.
TEST(Faults, BuffersOfRanksThatGaveUpAreLeftAlone) {
  for (int round = 0; round < 20; ++round) {
    const Outcome outcome = run_and_catch(4, kLong, [round](Communicator& comm) {
      std::vector<Tensor> send, receive;
      for (int p = 0; p < comm.size(); ++p) {
        send.push_back(at::ones({100'000}));
        receive.push_back(at::ones({100'000}));
      }
      Handle exchange = comm.all_to_all(std::move(send), std::move(receive), "exchange");
      if (comm.rank() == round % 4) throw DataError("broken");
      exchange.wait();
      comm.barrier("end");
    });
    EXPECT_EQ(outcome.error, "broken");
  }
}

TEST(Faults, UseAfterAFailureFailsAtOnce) {
  const Outcome outcome = run_and_catch(2, kLong, [](Communicator& comm) {
    if (comm.rank() == 0) comm.fail("interrupted");
    EXPECT_THROW(comm.barrier("a"), CommError);
    comm.barrier("b");
  });
  EXPECT_EQ(outcome.error, "b: rank 0 failed: interrupted");
}

TEST(Faults, BackwardFailsToo) {
  const Outcome outcome = run_and_catch(2, kLong, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::contiguous(4, 2);
    const Tensor leaf = at::ones({1, 2, 3}).requires_grad_();
    const Tensor y = gather_sequence_async(leaf, shards, comm, "latent").wait();
    if (comm.rank() == 1) throw DataError("broken");
    y.sum().backward();
  });
  EXPECT_EQ(outcome.error, "broken");
  EXPECT_EQ(outcome.ranks[0], "latent gradient: rank 1 failed: broken");
}

// A rank that waits for nobody never notices that the others are gone.
TEST(FaultsDeathTest, ARankThatDoesNotReturnEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_local_ranks(
                  3,
                  [](Communicator& comm) {
                    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::hours(1));
                    if (comm.rank() == 2) throw DataError("novel.txt: broken");
                    comm.barrier("start");
                  },
                  1, kShort),
              ::testing::ExitedWithCode(4),
              "^parlat: error: rank 2 failed: novel.txt: broken; rank 1 did not end within 5 s\n$");
}

TEST(Faults, NoRanksAreRefused) {
  EXPECT_THROW(run_local_ranks(0, [](Communicator&) {}), ConfigError);
}

}  // namespace
}  // namespace parlat
