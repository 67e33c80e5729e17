// Prompts run by one group of ranks and decoded by another give what one group alone gives.
#include "parlat/decode/handoff.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/decode/engine.h"
#include "tests/decode/small_model.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

const std::vector<int64_t> kPrompt = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};

Decoder make(const SavedModel& saved, const LayoutSpec& layout, Communicator& comm, bool slice_norm) {
  return {load_model_shard({.directory = saved.folder.path(), .slices = {}, .seed = 1}, saved.config, layout,
                           comm.size(), comm.rank(), at::kFloat),
          comm,
          {.cache_tokens = 1024, .cache_dtype = at::kFloat, .slice_norm = slice_norm}};
}

struct Logits {
  Tensor of_prompt, of_next;
};

Logits together(const SavedModel& saved, const LayoutSpec& layout, int ranks, bool slice_norm) {
  Logits logits;
  run_ranks(ranks, [&](Communicator& comm) {
    Decoder decoder = make(saved, layout, comm, slice_norm);
    Decoder::Prefill state{.slot = decoder.add_sequence(20), .done = 0, .latents = {}};
    const Tensor hidden = decoder.prefill(state, kPrompt);
    const Tensor prompt = decoder.logits(hidden.narrow(0, hidden.size(0) - 1, 1))[0];
    const Tensor next = decoder.logits(decoder.forward({{state.slot, static_cast<int64_t>(kPrompt.size()), 7}}))[0];
    if (comm.rank() == 0) logits = {prompt, next};
  });
  return logits;
}

Logits apart(const SavedModel& saved, const LayoutSpec& layout, int prefill_ranks, int decode_ranks, bool slice_norm,
             int64_t chunk_tokens) {
  Logits logits;
  run_ranks(prefill_ranks + decode_ranks, [&](Communicator& world) {
    const HandoffPlan plan = make_handoff_plan({.directory = saved.folder.path(), .slices = {}, .seed = 1},
                                               saved.config, layout, prefill_ranks, world.size());
    const bool prefills = world.rank() < prefill_ranks;
    const std::unique_ptr<Communicator> group = world.split(prefills ? 0 : 1);
    Decoder decoder = make(saved, prefills ? LayoutSpec() : layout, *group, slice_norm);
    const int64_t length = static_cast<int64_t>(kPrompt.size());
    const int64_t before = world.traffic()[Collective::kAllToAll].bytes;
    if (prefills) {
      serve_prompt(plan, decoder, kPrompt, chunk_tokens, world);
      EXPECT_EQ(decoder.cache().free_pages(), decoder.cache().pages());
      int64_t expected = 0;
      for (int d = 0; d < decode_ranks; ++d) {
        const Placement& p = plan.decoders[d];
        const int64_t width = saved.config.mla.dims.d_latent / p.groups + saved.config.mla.dims.d_rope;
        if (plan.source_of(d) == world.rank()) {
          expected += 4 * saved.config.n_layers * width * p.local_count(length);
        }
      }
      EXPECT_EQ(world.traffic()[Collective::kAllToAll].bytes - before, expected);
      return;
    }
    const int64_t slot = decoder.add_sequence(20);
    Tensor prompt;
    for (int64_t begin = 0, end = 0; begin < length; begin = end) {
      end = std::min(begin + chunk_tokens, length);
      prompt = take_over(plan, decoder, slot, {begin, end}, end == length, world);
      EXPECT_EQ(prompt.defined(), end == length);
    }
    const Tensor next = decoder.logits(decoder.forward({{slot, length, 7}}))[0];
    if (group->rank() == 0) logits = {prompt, next};
  });
  return logits;
}

TEST(Handoff, GroupsOfEverySizeAgree) {
  const SavedModel saved;
  const Tolerance tolerance = Tolerance::rounding(at::kFloat, 80, 16);
  using enum DecodeLayout;
  struct Case {
    LayoutSpec layout;
    int ranks;
    bool slice_norm = false;
  };
  for (const auto& [layout, ranks, slice_norm] : std::vector<Case>{{{kMla, 1}, 1},
                                                                   {{kMla, 1}, 3},
                                                                   {{kTpla, 2}, 2},
                                                                   {{kTpla, 2}, 2, /*slice_norm=*/true},
                                                                   {{kTpla, 2}, 4},
                                                                   {{kDcp, 1}, 3},
                                                                   {{kTplaDcp, 2}, 4},
                                                                   {{kTplaDcp, 2}, 4, /*slice_norm=*/true}}) {
    const Logits want = together(saved, layout, ranks, slice_norm);
    for (const int prefill_ranks : {1, 3}) {
      const int64_t chunk_tokens =
          prefill_ranks == 1 ? 4 : 2;  // the last is of 3, and of 1 for as many members or more
      SCOPED_TRACE(fmt::format("{} on {} after {}{}", name(layout.layout), ranks, prefill_ranks,
                               slice_norm ? ", slice norm" : ""));
      const Logits got = apart(saved, layout, prefill_ranks, ranks, slice_norm, chunk_tokens);
      EXPECT_CLOSE(got.of_prompt, want.of_prompt, tolerance);
      EXPECT_CLOSE(got.of_next, want.of_next, tolerance);
    }
  }
}

TEST(Handoff, SequencesGoOnBetweenTheChunksOfAPrompt) {
  const SavedModel saved;
  const LayoutSpec layout{DecodeLayout::kDcp, 1};
  constexpr int64_t kChunk = 4;  // three of the longer prompt
  std::vector<Request> requests(2);
  requests[0].prompt = {8, 2};
  requests[1].prompt = kPrompt;
  for (Request& request : requests) request.max_new_tokens = 9;
  // The request of each token, and the tokens of each request.
  const auto emissions = [&](Engine& engine) {
    for (const Request& request : requests) engine.submit(request);
    std::pair<std::vector<int64_t>, std::vector<std::vector<int64_t>>> got;
    got.second.resize(requests.size());
    while (!engine.idle()) {
      for (const Emission& emission : engine.step()) {
        got.first.push_back(emission.request);
        got.second[emission.request].push_back(emission.token);
      }
    }
    return got;
  };
  std::vector<std::vector<int64_t>> want;
  run_ranks(2, [&](Communicator& comm) {
    Decoder decoder = make(saved, layout, comm, false);
    Engine engine(decoder, {});
    const auto got = emissions(engine);
    if (comm.rank() == 0) want = got.second;
  });
  run_ranks(3, [&](Communicator& world) {
    const HandoffPlan plan = make_handoff_plan({.directory = saved.folder.path(), .slices = {}, .seed = 1},
                                               saved.config, layout, 1, world.size());
    const bool prefills = world.rank() == 0;
    const std::unique_ptr<Communicator> group = world.split(prefills ? 0 : 1);
    Decoder decoder = make(saved, prefills ? LayoutSpec() : layout, *group, false);
    if (prefills) {
      for (const Request& request : requests) serve_prompt(plan, decoder, request.prompt, kChunk, world);
      return;
    }
    EngineOptions options{.prefill_chunk = kChunk};
    options.remote_prefill = [&](int64_t slot, Range chunk, bool last) {
      return take_over(plan, decoder, slot, chunk, last, world);
    };
    Engine engine(decoder, options);
    const auto [order, tokens] = emissions(engine);
    EXPECT_EQ(tokens, want);
    const auto joined = std::find(order.begin(), order.end(), 1);
    EXPECT_EQ(joined - order.begin(), 1 + 3) << "the prompt's token, and one a chunk of the other's";
  });
}

TEST(Handoff, NeedsBothGroups) {
  const SavedModel saved;
  const ModelSource source{.directory = saved.folder.path(), .slices = {}, .seed = 1};
  EXPECT_THROW(make_handoff_plan(source, saved.config, {}, 2, 2), ConfigError);
  EXPECT_THROW(make_handoff_plan(source, saved.config, {}, 0, 2), ConfigError);
}

}  // namespace
}  // namespace parlat
