// Every collective and its gradient on 1 to 8 ranks, uneven and empty shards included; the bytes counted; the same bits
// twice.
#include <gmock/gmock.h>

#include "tests/comm/cases.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

constexpr int kRanks[] = {1, 2, 3, 4, 7, 8};

class EveryCase : public ::testing::TestWithParam<std::tuple<CommCase, int>> {};

TEST_P(EveryCase, IsExactAndRepeatable) {
  const auto& [test, ranks] = GetParam();
  std::vector<std::vector<Tensor>> first(ranks), second(ranks);
  run_ranks(ranks, [&, run = test.run](Communicator& comm) {
    first[comm.rank()] = run(comm);
    second[comm.rank()] = run(comm);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_EQ(first[rank].size(), second[rank].size());
    for (size_t i = 0; i < first[rank].size(); ++i) EXPECT_TRUE(at::equal(first[rank][i], second[rank][i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Comm, EveryCase, Combine(ValuesIn(all_comm_cases()), ValuesIn(kRanks)), [](const auto& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
});

class Counted : public ::testing::TestWithParam<int> {};

TEST_P(Counted, HeadExchangesSendWhatTheirHeadersSay) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::zigzag(29, comm.size());
    const HeadShards heads(16, comm.size());
    const int64_t local = shards.count(comm.rank()), mine = heads.range(comm.rank()).size();
    const Traffic start = comm.traffic();
    const Tensor x = at::ones({2, local, 16, 3}).requires_grad_();
    Tensor y = scatter_heads_gather_sequence(x, heads, shards, comm, "x");
    const Traffic forward = comm.traffic() - start;
    EXPECT_EQ(forward.bytes(), 2 * local * (16 - mine) * 3 * 4);
    EXPECT_EQ(forward.paper_bytes(), forward.bytes());
    y.sum().backward();
    EXPECT_EQ((comm.traffic() - start - forward).bytes(), 2 * (29 - local) * mine * 3 * 4);

    const Traffic before = comm.traffic();
    const Tensor latent = at::ones({2, local, 5}).requires_grad_();
    y = gather_sequence_async(latent, shards, comm, "x").wait();
    const Traffic gather = comm.traffic() - before;
    EXPECT_EQ(gather.bytes(), (comm.size() - 1) * 2 * local * 5 * 4);
    EXPECT_EQ(gather.paper_bytes(), comm.size() > 1 ? 2 * local * 5 * 2 : 0);
    y.sum().backward();
    EXPECT_EQ((comm.traffic() - before - gather)[Collective::kReduceScatter].bytes, 2 * (29 - local) * 5 * 4);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Counted, ValuesIn(kRanks));

TEST(OneRank, ReturnsTheSameTensorAndSendsNothing) {
  run_ranks(1, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::zigzag(5, 1);
    const HeadShards heads(3, 1);
    const Tensor x = at::rand({2, 5, 3, 4}).requires_grad_(), c = at::rand({2, 5, 4}), rows = at::rand({4, 2});
    EXPECT_TRUE(scatter_heads_gather_sequence(x, heads, shards, comm, "x").is_same(x));
    EXPECT_TRUE(scatter_sequence_gather_heads(x, heads, shards, comm, "x").is_same(x));
    EXPECT_TRUE(gather_sequence_async(c, shards, comm, "x").wait().is_same(c));
    EXPECT_TRUE(exchange_rows(rows, {4}, {4}, comm, "x").is_same(rows));
    EXPECT_EQ(comm.traffic().bytes(), 0);
  });
}

// <A x, y> = <x, A^T y>, summed over ranks.
TEST(Adjoint, OfTheGather) {
  run_ranks(3, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::zigzag(29, 3);
    const Tensor x = seeded_normal({2, shards.count(comm.rank()), 5}, 1, 1, std::to_string(comm.rank()), at::kDouble);
    const Tensor y = seeded_normal({2, 29, 5}, 1, 2, std::to_string(comm.rank()), at::kDouble);
    const Tensor leaf = x.detach().requires_grad_();
    const Tensor ax = gather_sequence_async(leaf, shards, comm, "x").wait();
    ax.backward(y);
    const double left = comm.sum_over_ranks((ax * y).sum().item<double>(), "left");
    const double right = comm.sum_over_ranks((x * leaf.grad()).sum().item<double>(), "right");
    EXPECT_NEAR(left, right, 1e-10);
  });
}

// A rank whose loss does not depend on the exchange still takes part in the backward pass.
TEST(Adjoint, TakesPartWithZerosWhereNoGradientArrives) {
  run_ranks(2, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::contiguous(4, 2);
    const Tensor leaf = at::ones({1, 2, 3}).requires_grad_();
    const Tensor y = gather_sequence_async(leaf, shards, comm, "x").wait();
    (y * (comm.rank() == 0 ? 1 : 0)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), at::ones({1, 2, 3})));
  });
}

TEST(Gather, DroppedUnwaitedIsFinished) {
  run_ranks(2, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::contiguous(4, 2);
    { const PendingGather dropped(at::ones({1, 2, 3}), shards, comm, "x"); }
    comm.barrier("after");
  });
}

TEST(Shapes, AreCheckedAtTheDoor) {
  run_ranks(2, [](Communicator& comm) {
    const SequenceShards shards = SequenceShards::contiguous(4, 2);
    const HeadShards heads(4, 2);
    EXPECT_THROW(scatter_heads_gather_sequence(at::ones({1, 3, 4, 2}), heads, shards, comm, "x"), ConfigError);
    EXPECT_THROW(scatter_sequence_gather_heads(at::ones({1, 4, 4, 2}), heads, shards, comm, "x"), ConfigError);
    EXPECT_THROW(gather_sequence_async(at::ones({1, 3, 2}), shards, comm, "x"), ConfigError);
    EXPECT_THROW(exchange_rows(at::ones({3, 2}), {1, 1}, {1, 1}, comm, "x"), ConfigError);
    EXPECT_THROW(comm.all_reduce(at::ones({2, 3}).t(), "x"), InternalError);
    EXPECT_THROW(comm.all_gather(at::ones({2}), {at::ones({2}), at::ones({2}, at::kDouble)}, "x"), InternalError);
    EXPECT_THROW(comm.broadcast(at::ones({2}), 2, "x"), InternalError);
    EXPECT_THROW(comm.send_recv(at::ones({2}), comm.rank(), at::ones({3}), comm.rank(), "x"), InternalError);
  });
}

}  // namespace
}  // namespace parlat
