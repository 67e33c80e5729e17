// Several layouts over the same windows: what each gives alone, and nothing is run twice.
#include "parlat/decode/evaluate.h"

#include <gmock/gmock.h>

#include <limits>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

class EvaluateTest : public ::testing::Test {
 protected:
  Decoder decoder(DecodeLayout layout, int64_t groups, Communicator& comm) const {
    return {load_model_shard({.directory = saved_.folder.path(), .slices = {}, .seed = 1}, saved_.config,
                             {layout, groups}, comm.size(), comm.rank(), at::kFloat),
            comm, DecoderOptions{.cache_tokens = 256, .cache_dtype = at::kFloat, .slice_norm = false}};
  }

  static std::vector<std::vector<int64_t>> windows() {
    const Tensor tokens = seeded_integers({100}, 61, 2, "text");
    return text_windows({tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + 100}, 20, "text");
  }

  // What was evaluated, and the bytes a rank sent for it.
  static std::pair<std::vector<Evaluation>, int64_t> run(const std::vector<Decoder*>& decoders, Decoder* reference,
                                                         Communicator& comm) {
    const Traffic before = comm.traffic();
    auto sums = evaluate(decoders, reference, windows(), 1, {.max_tokens = 70}, [](int64_t) {});
    return {std::move(sums), (comm.traffic() - before).bytes()};
  }

  SavedModel saved_;
};

TEST_F(EvaluateTest, LayoutsTogetherGiveWhatEachGivesAlone) {
  run_ranks(2, [&](Communicator& comm) {
    Decoder mla = decoder(DecodeLayout::kMla, 1, comm), tpla = decoder(DecodeLayout::kTpla, 2, comm);
    const auto [exact, exact_bytes] = run({&mla}, nullptr, comm);
    const auto [sliced, sliced_bytes] = run({&tpla}, nullptr, comm);
    const auto [against, against_bytes] = run({&tpla}, &mla, comm);
    const auto [both, bytes] = run({&tpla, &mla}, &mla, comm);

    EXPECT_EQ(both[0].tokens, 70);
    EXPECT_EQ(both[0].loss, sliced[0].loss);
    EXPECT_EQ(both[0].kl, against[0].kl);
    EXPECT_EQ(both[0].agreed, against[0].agreed);
    EXPECT_GT(both[0].kl, 0);
    EXPECT_EQ(both[1].loss, exact[0].loss);
    EXPECT_EQ(both[1].correct, exact[0].correct);
    EXPECT_EQ(both[1].kl, 0);
    EXPECT_EQ(both[1].agreed, 70);
    EXPECT_EQ(bytes, exact_bytes + sliced_bytes);
    EXPECT_EQ(against_bytes, bytes);
  });
}

// A greedy maximum and a mean would take NaN and infinity for numbers.
TEST_F(EvaluateTest, WeightsWithoutFiniteLogitsAreTheCheckpointsFault) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const std::vector<WeightRow> table = weight_table(saved_.config, all_experts(saved_.config), saved_.weights);
    load_weights(saved_.folder.path(), saved_.config, table, at::kFloat);
    saved_.weights.head[7][0].fill_(bad);
    save_weights(saved_.folder.path(), saved_.config, table);
    run_ranks(2, [&](Communicator& comm) {
      Decoder mla = decoder(DecodeLayout::kMla, 1, comm);
      try {
        run({&mla}, nullptr, comm);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const DataError& error) {
        EXPECT_THAT(error.what(), ::testing::StartsWith(saved_.folder.path().string() + ": expected weights that"));
      }
    });
  }
}

}  // namespace
}  // namespace parlat
