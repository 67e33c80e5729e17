// Requests that join and leave get what they would get alone.
#include "parlat/decode/engine.h"

#include <gmock/gmock.h>

#include <limits>
#include <map>

#include "parlat/base/error.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Answer {
  std::vector<int64_t> tokens;
  std::optional<Finish> finish;
};

class EngineTest : public ::testing::Test {
 protected:
  std::unique_ptr<Decoder> decoder(const LayoutSpec& layout, int64_t cache_tokens, Communicator& comm) {
    ModelShard shard = load_model_shard({.directory = saved_.folder.path(), .slices = {}, .seed = 1}, saved_.config,
                                        layout, comm.size(), comm.rank(), at::kFloat);
    auto made = std::make_unique<Decoder>(
        std::move(shard), comm,
        DecoderOptions{.cache_tokens = cache_tokens, .cache_dtype = at::kFloat, .slice_norm = false});
    made->cache().poison();
    return made;
  }

  std::map<int64_t, Answer> answers(const std::vector<Request>& requests, const LayoutSpec& layout, int ranks,
                                    int64_t cache_tokens, const EngineOptions& options) {
    std::map<int64_t, Answer> result;
    run_ranks(ranks, [&](Communicator& comm) {
      const auto model = decoder(layout, cache_tokens, comm);
      Engine engine(*model, options);
      for (const Request& request : requests) engine.submit(request);
      std::map<int64_t, Answer> mine;
      while (!engine.idle()) {
        for (const auto& [request, token, finish] : engine.step()) {
          EXPECT_FALSE(mine[request].finish) << "a token after the last";
          mine[request].tokens.push_back(token);
          mine[request].finish = finish;
        }
      }
      EXPECT_EQ(model->cache().free_pages(), model->cache().pages()) << "pages not given back";
      if (comm.rank() == 0) result = mine;
    });
    return result;
  }

  static Request request(std::vector<int64_t> prompt, int64_t count) {
    return {.prompt = std::move(prompt), .max_new_tokens = count, .stop_tokens = {}, .sampling = {}};
  }

  SavedModel saved_;
};

std::vector<int64_t> prompt(int64_t count, int64_t first) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back((first + 7 * i * i) % 61);
  return tokens;
}

TEST_F(EngineTest, BatchingLayoutsAndChunksDoNotChangeTheTokens) {
  const std::vector<Request> requests = {request(prompt(1, 3), 20), request(prompt(70, 5), 12),
                                         request(prompt(9, 8), 25), request(prompt(33, 1), 1),
                                         request(prompt(2, 60), 30)};
  std::map<int64_t, Answer> alone;
  for (size_t i = 0; i < requests.size(); ++i) {
    alone[i] = answers({requests[i]}, {}, 1, 128, {.prefill_chunk = 512, .exact_prefill = true})[0];
    EXPECT_EQ(alone[i].tokens.size(), requests[i].max_new_tokens);
    EXPECT_EQ(alone[i].finish, Finish::kLength);
  }
  using enum DecodeLayout;
  for (const auto& [layout, ranks] : {std::pair{LayoutSpec{kMla, 1}, 3},
                                      {LayoutSpec{kMla, 1}, 8},
                                      {LayoutSpec{kDcp, 1}, 4},
                                      {LayoutSpec{kDcp, 1}, 8}}) {
    for (const bool exact : {true, false}) {
      // Room for two requests or so at a time.
      const auto got = answers(requests, layout, ranks, 192, {.prefill_chunk = 16, .exact_prefill = exact});
      for (const auto& [id, answer] : alone) {
        EXPECT_EQ(got.at(id).tokens, answer.tokens) << name(layout.layout) << " on " << ranks << ", request " << id;
      }
    }
  }
}

TEST_F(EngineTest, MembersThatSplitTokensAdmitTheSameRequests) {
  // Three pages a rank; a request's 129 tokens are 65 on rank 0, two pages, and 64 on rank 1, which one would hold.
  const std::vector<Request> requests = {request(prompt(120, 3), 9), request(prompt(121, 5), 8)};
  run_ranks(2, [&](Communicator& comm) {
    const auto model = decoder({DecodeLayout::kDcp, 1}, 384, comm);
    EXPECT_EQ(model->cache().pages(), 3);
    model->add_sequence(129);
    EXPECT_FALSE(model->has_room(129)) << "rank " << comm.rank();
    EXPECT_TRUE(model->has_room(128)) << "rank " << comm.rank();
  });
  if (HasFailure()) return;  // ranks that admit different requests wait for one another until they time out
  const auto got = answers(requests, {DecodeLayout::kDcp, 1}, 2, 384, {});
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(got.at(i).tokens, answers({requests[i]}, {}, 1, 192, {})[0].tokens) << "request " << i;
  }
}

TEST_F(EngineTest, RoomForSequencesIsRoomForAllOfThem) {
  const std::vector<int64_t> lengths = {1, 64, 65, 129, 200};
  using enum DecodeLayout;
  for (const auto& [layout, ranks] :
       {std::pair{LayoutSpec{kMla, 1}, 3}, {LayoutSpec{kDcp, 1}, 3}, {LayoutSpec{kTplaDcp, 2}, 4}}) {
    run_ranks(ranks, [&, &layout = layout](Communicator& comm) {
      const Placement placement = place(layout, saved_.config.mla.dims, comm.size(), comm.rank());
      const auto model = decoder(layout, Decoder::cache_tokens_for(lengths, placement), comm);
      for (const int64_t length : lengths) model->add_sequence(length);
      EXPECT_EQ(model->cache().free_pages(), 0) << name(layout.layout) << ", rank " << comm.rank();
    });
  }
}

TEST_F(EngineTest, StopsAtStopTokensAndAtTheContext) {
  const auto whole = answers({request(prompt(5, 2), 10)}, {}, 1, 128, {})[0].tokens;
  Request stopping = request(prompt(5, 2), 10);
  stopping.stop_tokens = {whole[3], 1000};
  const Answer stopped = answers({stopping}, {}, 1, 128, {})[0];
  const auto first = std::find(whole.begin(), whole.end(), whole[3]);
  EXPECT_EQ(stopped.tokens, std::vector<int64_t>(whole.begin(), first + 1));
  EXPECT_EQ(stopped.finish, Finish::kStopToken);

  const Answer full = answers({request(prompt(505, 2), 100)}, {}, 2, 512, {})[0];
  EXPECT_EQ(full.tokens.size(), 7);  // the context of 512
  EXPECT_EQ(full.finish, Finish::kContext);
  const Answer endless = answers({request(prompt(505, 2), std::numeric_limits<int64_t>::max())}, {}, 1, 512, {})[0];
  EXPECT_EQ(endless.tokens, full.tokens);
}

TEST_F(EngineTest, SampledTokensAreTheSameInEveryBatch) {
  Request drawn = request(prompt(4, 9), 15);
  drawn.sampling = {.temperature = 1.5, .top_k = 20, .top_p = 0.95, .seed = 77};
  const auto alone = answers({drawn}, {}, 1, 128, {})[0].tokens;
  const auto both = answers({request(prompt(20, 3), 15), drawn}, {DecodeLayout::kMla, 1}, 2, 256, {});
  EXPECT_EQ(both.at(1).tokens, alone);
}

TEST_F(EngineTest, RefusesRequestsThatCannotBe) {
  run_ranks(1, [&](Communicator& comm) {
    const auto model = decoder({}, 128, comm);
    Engine engine(*model, {});
    const auto refusal = [&](const Request& bad) -> std::string {
      try {
        engine.submit(bad);
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "nothing was thrown";
    };
    EXPECT_THAT(refusal(request({}, 3)), HasSubstr("at least one token"));
    EXPECT_THAT(refusal(request({61}, 3)), HasSubstr("tokens from 0 to 60, got 61"));
    EXPECT_THAT(refusal(request({-1}, 3)), HasSubstr("got -1"));
    EXPECT_THAT(refusal(request({1}, 0)), HasSubstr("at least 1, got 0"));
    EXPECT_THAT(refusal(request(prompt(512, 1), 3)), HasSubstr("context of 512, got 512"));
    EXPECT_THAT(refusal(request(prompt(100, 1), 100)), HasSubstr("room for the 200 tokens"));
    EXPECT_TRUE(engine.idle());
  });
}

}  // namespace
}  // namespace parlat
