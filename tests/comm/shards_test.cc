// Groups of ranks, and how their ranks share what they hold.
#include "parlat/comm/shards.h"

#include <gtest/gtest.h>

#include "tests/shard_indices.h"

namespace parlat {
namespace {

TEST(SequenceShards, GroupsHoldWhatTheirRanksHold) {
  for (const int64_t sequence : {29, 16, 3, 0}) {
    for (const SequenceShards& shards :
         {SequenceShards::contiguous(sequence, 6), SequenceShards::zigzag(sequence, 6)}) {
      for (const int size : {1, 2, 3, 6}) {
        const SequenceShards groups = shards.grouped(size);
        ASSERT_EQ(groups.ranks(), 6 / size);
        for (int group = 0; group < groups.ranks(); ++group) {
          const at::Tensor held = shard_indices(groups, group);
          const SequenceShards within = shards.within_group(size, group);
          ASSERT_EQ(within.ranks(), size);
          EXPECT_EQ(within.sequence(), held.numel());
          std::vector<at::Tensor> of_ranks;
          for (int place = 0; place < size; ++place) {
            of_ranks.push_back(shard_indices(shards, group * size + place));
            // Numbered within the group, a rank's tokens are the same ones in the same order.
            EXPECT_TRUE(held.index_select(0, shard_indices(within, place)).equal(of_ranks.back()));
          }
          EXPECT_TRUE(held.equal(std::get<0>(at::cat(of_ranks).sort())));
        }
      }
    }
  }
}

TEST(SequenceShards, CountsTokensBeforeAnIndex) {
  const SequenceShards shards = SequenceShards::zigzag(29, 3);
  for (int rank = 0; rank < 3; ++rank) {
    const at::Tensor indices = shard_indices(shards, rank);
    for (int64_t index = 0; index <= 29; ++index) {
      EXPECT_EQ(shards.count_before(rank, index), (indices < index).sum().item<int64_t>());
    }
  }
}

}  // namespace
}  // namespace parlat
