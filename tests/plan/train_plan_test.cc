#include "parlat/plan/train_plan.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>

#include "parlat/base/error.h"
#include "parlat/plan/crossover.h"
#include "parlat/plan/flops.h"
#include "tests/plan/machines.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

TrainPlanOptions v3_options(int64_t ranks, int64_t nodes, int64_t sequence) {
  return {.dims = load_model_config("v3").mla.dims, .ranks = ranks, .nodes = nodes, .sequence = sequence};
}

FormPlan find(const TrainPlan& plan, const std::string& label) {
  for (const FormPlan& form : plan.forms) {
    if (form.label == label) return form;
  }
  ADD_FAILURE() << "no " << label;
  return {};
}

FormPlan planned(const Machine& machine, const TrainPlanOptions& options, const std::string& label) {
  return find(plan_train(machine, options), label);
}

std::string refusal(const Machine& machine, const TrainPlanOptions& options) {
  try {
    plan_train(machine, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

// LAGA's Table 1 as it is printed: MB a rank and forward pass.
TEST(TrainPlan, ReproducesTableOne) {
  struct Cell {
    int64_t ranks, sequence;
    const char *of_explicit, *of_absorbed, *of_laga;
  };
  const auto printed = [](const FormPlan& plan) {
    return fmt::format("{:.1f}", static_cast<double>(plan.costs.paper_bytes) / 1e6);
  };
  for (const Cell& cell : {Cell{4, 4096, "251.7", "127.0", "127.0"}, Cell{4, 8192, "503.3", "254.0", "254.0"},
                           Cell{8, 4096, "146.8", "74.0", "74.0"}, Cell{8, 8192, "293.6", "148.0", "148.0"},
                           Cell{8, 16384, "587.2", "296.0", "296.0"}, Cell{16, 4096, "78.6", "39.6", "39.6"},
                           Cell{16, 8192, "157.3", "79.2", "79.2"}, Cell{16, 16384, "314.6", "158.5", "158.5"}}) {
    const TrainPlan plan = plan_train(round_machine(), v3_options(cell.ranks, cell.ranks > 8 ? 2 : 1, cell.sequence));
    EXPECT_EQ(printed(find(plan, "explicit")), cell.of_explicit) << cell.ranks << " ranks, " << cell.sequence;
    EXPECT_EQ(printed(find(plan, "absorbed")), cell.of_absorbed) << cell.ranks << " ranks, " << cell.sequence;
    EXPECT_EQ(printed(find(plan, "laga")), cell.of_laga) << cell.ranks << " ranks, " << cell.sequence;
  }
  // Its figure 3b: the ratio grows with heads.
  for (const auto& [heads, ratio] :
       {std::pair<int64_t, const char*>{16, "1.88"}, {32, "1.94"}, {64, "1.97"}, {128, "1.98"}}) {
    TrainPlanOptions options = v3_options(8, 1, 8192);
    options.dims.n_heads = heads;
    const TrainPlan plan = plan_train(round_machine(), options);
    EXPECT_EQ(fmt::format("{:.2f}", static_cast<double>(find(plan, "explicit").costs.paper_bytes) /
                                        static_cast<double>(find(plan, "laga").costs.paper_bytes)),
              ratio);
  }
}

TEST(TrainPlan, HasEveryFormAndEverySplit) {
  std::vector<std::string> labels;
  for (const FormPlan& form : plan_train(round_machine(), v3_options(16, 2, 4096)).forms) labels.push_back(form.label);
  EXPECT_THAT(labels, ::testing::ElementsAre("explicit", "absorbed", "laga", "laga-q", "ring", "hybrid 2x8",
                                             "hybrid 4x4", "hybrid 8x2"));
}

TEST(TrainPlan, PlansTheSplitThatIsAskedFor) {
  TrainPlanOptions options = v3_options(16, 2, 4096);
  options.attention.ring_groups = 4;
  std::vector<std::string> labels;
  for (const FormPlan& form : plan_train(round_machine(), options).forms) labels.push_back(form.label);
  EXPECT_THAT(labels, ::testing::ElementsAre("explicit", "absorbed", "laga", "laga-q", "ring", "hybrid 4x4"));
  for (const int64_t groups : {-1, 3, 32}) {
    options.attention.ring_groups = groups;
    EXPECT_EQ(refusal(round_machine(), options),
              fmt::format("form hybrid: expected ring-groups that divide the 16 sequence ranks, or 0, got {}", groups));
  }
}

TEST(TrainPlan, ComputesWhatFlopsSay) {
  Machine machine = round_machine();
  machine.memory_bytes_per_s = 1e18;
  const TrainPlanOptions options = v3_options(1, 1, 4096);
  const AttentionFlops flops = attention_flops(options.dims, {4096});
  const double once = flops.projections / 1e12, attention = flops.attention / 5e11;
  const double backward = static_cast<double>(3 * 192 + 2 * 128) / (192 + 128);
  const FormPlan of_explicit = planned(machine, options, "explicit");
  EXPECT_NEAR(of_explicit.compute_s, 3 * once + (1 + backward) * attention + 3e-3, 1e-6);
  EXPECT_EQ(of_explicit.exchange_s, 0);
  // Keys and values are rebuilt once more.
  const double up = 2.0 * 4096 * 512 * 128 * 256 / 1e12;
  EXPECT_NEAR(planned(machine, options, "laga").compute_s, of_explicit.compute_s + up, 1e-6);
}

// By form, from the widths of mla.md: 4096 tokens on 8 ranks, 16 heads each.
TEST(TrainPlan, CountsFlopsOfEveryForm) {
  const TrainPlanOptions options = v3_options(8, 1, 4096);
  const AttentionFlops all = attention_flops(options.dims, {4096});
  const double up = 2.0 * 512 * 512 * 128 * 256;  // of a rank's share
  const double others = all.projections / 8 - up, attention = all.attention / 8;
  const double back = attention * (3 * 192 + 2 * 128) / (192 + 128);  // scores once more
  struct Cell {
    const char* label;
    double forward, backward;
  };
  const double latent_pairs = 2.0 * 4096 * 4097 / 2 * 16;
  for (const Cell& cell :
       {Cell{"explicit", others + up + attention, 2 * (others + up) + back},
        Cell{"absorbed", others + up + latent_pairs * (576 + 512),
             2 * (others + up) + latent_pairs * (3 * 576 + 2 * 512)},
        Cell{"laga", others + up + attention, 2 * others + 3 * up + back},  // keys and values are made again
        Cell{"laga-q", others + up + attention, 2 * others + 3 * up + back},
        Cell{"ring", others + 8 * up + attention, 2 * others + 24 * up + back},  // of all heads, at every hop
        Cell{"hybrid 2x4", others + 2 * up + attention, 2 * others + 6 * up + back}}) {
    SCOPED_TRACE(cell.label);
    const FormPlan plan = planned(round_machine(), options, cell.label);
    EXPECT_NEAR(plan.forward_flops, cell.forward, 1e-12 * cell.forward);
    EXPECT_NEAR(plan.backward_flops, cell.backward, 1e-12 * cell.backward);
  }
  TrainPlanOptions eager = options;
  eager.attention.kernel = AttentionKernel::kEager;
  const FormPlan saved = planned(round_machine(), eager, "laga");
  EXPECT_NEAR(saved.backward_flops, 2 * saved.forward_flops, 1e-12 * saved.forward_flops);
  eager.backward = false;
  EXPECT_EQ(planned(round_machine(), eager, "laga").backward_flops, 0);
}

TEST(TrainPlan, WaitsForBytesAndLatencies) {
  TrainPlanOptions options = v3_options(8, 1, 4096);
  options.backward = false;
  const FormPlan laga = planned(round_machine(), options, "laga");
  const SentBytes& sent = laga.costs.forward;
  EXPECT_EQ(sent.all_to_all, 512 * 2 * (128 - 16) * (192 + 128));
  EXPECT_NEAR(laga.exchange_s, static_cast<double>(sent.total()) / 1e9 + 3e-5, 1e-9);
  EXPECT_EQ(laga.steps, 3);
  EXPECT_EQ(laga.between_bytes, 0);
}

TEST(TrainPlan, WaitsForTheSlowerLink) {
  TrainPlanOptions options = v3_options(16, 2, 4096);
  options.backward = false;
  const FormPlan of_explicit = planned(round_machine(), options, "explicit");
  const auto sent = static_cast<double>(of_explicit.costs.forward.total());
  EXPECT_NEAR(static_cast<double>(of_explicit.between_bytes), sent * 8 / 15, 1);
  EXPECT_NEAR(of_explicit.exchange_s, sent * 8 / 15 / 1e8 + 4e-4, 1e-9);

  Machine machine = round_machine();
  const auto gathered = [&] {
    const FormPlan laga = planned(machine, options, "laga");
    return static_cast<double>(laga.between_bytes) - static_cast<double>(laga.costs.forward.all_to_all) * 8 / 15;
  };
  const double shard = 4096.0 / 16 * 576 * 2;
  EXPECT_NEAR(gathered(), 8 * shard, 2);
  machine.hierarchical_gather = true;
  EXPECT_NEAR(gathered(), shard, 2);
}

TEST(TrainPlan, HidesHopsBehindAttention) {
  Machine machine = round_machine();
  TrainPlanOptions options = v3_options(8, 1, 4096);
  options.backward = false;
  const FormPlan bare = planned(machine, options, "ring");
  const double all = bare.exchange_s;
  EXPECT_NEAR(all, static_cast<double>(bare.costs.forward.send_recv) / 1e9 + 7e-5, 1e-9);
  EXPECT_EQ(bare.steps, 7);
  machine.overlap = 0.5;
  const FormPlan half = planned(machine, options, "ring");
  EXPECT_NEAR(half.exchange_s, all / 2, 1e-9);  // a hop is shorter than its attention
  EXPECT_NEAR(half.hidden_s, all / 2, 1e-9);
  // Backward, latents and gradients are 7 exchanges each, of which the gradients' last hides behind nothing.
  options.backward = true;
  const FormPlan both = planned(machine, options, "ring");
  const auto latents = static_cast<double>(both.costs.forward.send_recv);
  const double gradients = static_cast<double>(both.costs.backward.send_recv) - latents;
  const double last = gradients / 7 / 1e9 + 1e-5, passes = (2 * latents + gradients) / 1e9 + 3 * 7e-5;
  EXPECT_EQ(both.steps, 21);
  EXPECT_NEAR(both.hidden_s, (passes - last) / 2, 1e-9);
  EXPECT_NEAR(both.exchange_s, (passes + last) / 2, 1e-9);
  options.backward = false;
  machine.overlap = 1;
  machine.within.bytes_per_s = 1e6;  // and now longer, by the rest
  const FormPlan slow = planned(machine, options, "ring");
  EXPECT_GT(slow.exchange_s, 0);
  const double longer = static_cast<double>(bare.costs.forward.send_recv) / 1e6 + 7e-5;
  EXPECT_NEAR(slow.exchange_s + slow.hidden_s, longer, 1e-9);
}

TEST(TrainPlan, RanksBeyondTheFullRateShareIt) {
  Machine machine = round_machine();
  machine.layer_overhead_s = 0;
  const double alone = planned(machine, v3_options(8, 1, 4096), "explicit").compute_s;
  machine.ranks_at_full_rate = 2;
  EXPECT_NEAR(planned(machine, v3_options(8, 1, 4096), "explicit").compute_s, 4 * alone, 1e-9);
  EXPECT_NEAR(planned(machine, v3_options(2, 1, 4096), "explicit").compute_s,
              planned(round_machine(), v3_options(2, 1, 4096), "explicit").compute_s - 3e-3, 1e-9);
}

// 16 heads a rank, twice the visible pairs of 4096 tokens, two bytes each: explicit's scores pass 4 times through
// memory forward and 7 times backward, those that are the sum of two products 6 times more.
TEST(TrainPlan, ScoresThatAreWrittenTakeProductsAndPasses) {
  TrainPlanOptions options = v3_options(8, 1, 4096);
  options.attention.kernel = AttentionKernel::kEager;
  options.as_published = true;
  Machine half = round_machine();
  half.attention["bf16"].written_share = 0.5;  // so that what they take comes on top once more
  const auto taken = [&](const char* label) {
    return planned(half, options, label).compute_s - planned(round_machine(), options, label).compute_s;
  };
  const double scores = 16.0 * 4096 * 4097, pass = scores * 2 / 1e11;
  EXPECT_NEAR(taken("explicit"), 3 * 2 * scores * (192 + 128) / 1e12 + 11 * pass, 1e-9);
  EXPECT_NEAR(taken("laga"), taken("explicit"), 1e-9);
  EXPECT_NEAR(taken("absorbed"), 3 * 2 * scores * (576 + 512) / 1e12 + 17 * pass, 1e-9);
  options.attention.kernel = AttentionKernel::kFused;
  EXPECT_EQ(taken("explicit"), 0);
}

TEST(TrainPlan, ContiguousRingWaitsForTheLastRank) {
  TrainPlanOptions options = v3_options(8, 1, 1 << 20);
  const double balanced = planned(round_machine(), options, "ring").compute_s;
  options.sharding = Sharding::kContiguous;
  EXPECT_GT(planned(round_machine(), options, "ring").compute_s, 1.5 * balanced);
  EXPECT_LT(planned(round_machine(), options, "ring").compute_s, 2 * balanced);
}

TEST(TrainPlan, SaysWhatDoesNotFit) {
  TrainPlanOptions options = v3_options(8, 1, 16384);
  options.layers = 61;
  options.memory_bytes = 20e9;
  const TrainPlan plan = plan_train(round_machine(), options);
  const FormPlan absorbed = find(plan, "absorbed"), laga = find(plan, "laga");
  EXPECT_THAT(absorbed.misfit, HasSubstr("of activations in 20.0 GB"));
  EXPECT_EQ(laga.misfit, "");
  EXPECT_EQ(laga.memory_bytes, static_cast<double>(60 * laga.costs.saved_bytes + laga.peak_bytes));
  options.memory_bytes = 1e6;
  const TrainPlan nothing = plan_train(round_machine(), options);
  EXPECT_FALSE(nothing.best);
  EXPECT_EQ(nothing.reason, "nothing fits in 1.0 MB a rank: more ranks, fewer tokens, or layers that are recomputed");
  options.backward = false;
  EXPECT_EQ(plan_train(round_machine(), options).reason, "nothing fits in 1.0 MB a rank: more ranks or fewer tokens");
}

TEST(TrainPlan, LayersOfAForwardPassKeepNothingForEachOther) {
  TrainPlanOptions options = v3_options(8, 1, 65536);
  options.layers = 61;
  options.backward = false;
  for (const FormPlan& form : plan_train(load_machine("h800x8-roce"), options).forms) {
    if (!form.runs) continue;
    EXPECT_EQ(form.memory_bytes, static_cast<double>(form.peak_bytes)) << form.label;
  }
}

TEST(TrainPlan, UsesTheFastestThatFits) {
  const TrainPlan plan = plan_train(round_machine(), v3_options(16, 2, 16384));
  ASSERT_TRUE(plan.best);
  const FormPlan& best = plan.forms[*plan.best];
  for (const FormPlan& form : plan.forms) EXPECT_LE(best.total_s(), form.total_s()) << form.label;
  EXPECT_THAT(plan.reason, ::testing::StartsWith(best.label + ": "));
}

TEST(TrainPlan, RefusesWhatCannotBe) {
  const Machine machine = round_machine();
  EXPECT_EQ(refusal(machine, v3_options(0, 1, 4096)), "ranks: expected 1 to 1048576, got 0");
  EXPECT_EQ(refusal(machine, v3_options(8, -1, 4096)), "nodes: expected a divisor of the 8 ranks, got -1");
  EXPECT_EQ(refusal(machine, v3_options(8, 1, 0)), "sequence: expected at least 1, got 0");
  EXPECT_EQ(refusal(machine, v3_options(8, 3, 4096)), "nodes: expected a divisor of the 8 ranks, got 3");
  EXPECT_EQ(refusal(machine, v3_options(16, 1, 4096)), "ranks: expected at most 8 on each of 1 node of round, got 16");
  TrainPlanOptions options = v3_options(8, 1, 4096);
  options.dtype = "fp32";
  EXPECT_THAT(refusal(machine, options), HasSubstr("round: gemm.fp32: expected"));
  options.dtype = "int8";
  EXPECT_THAT(refusal(machine, options), HasSubstr("int8"));
}

// Sizes beyond any cluster: figures stay positive, or one line says why not.
TEST(TrainPlan, LargeSizesDoNotWrapAround) {
  Machine machine = round_machine();
  machine.memory_bytes = 1e18;
  for (const auto& [ranks, nodes] : {std::pair<int64_t, int64_t>{1, 1}, {128, 16}, {100'000, 12'500}}) {
    const TrainPlan plan = plan_train(machine, v3_options(ranks, nodes, 10'000'000));
    for (const FormPlan& form : plan.forms) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", form.label, ranks));
      if (!form.runs) {
        EXPECT_THAT(form.misfit, HasSubstr("expected at most 128"));
        continue;
      }
      EXPECT_GT(form.costs.saved_bytes, 0);
      EXPECT_GT(form.peak_bytes, form.costs.saved_bytes);
      EXPECT_TRUE(std::isfinite(form.total_s()) && form.total_s() > 0);
      for (const int64_t bytes :
           {form.costs.forward.total(), form.costs.backward.total(), form.costs.paper_bytes, form.between_bytes}) {
        EXPECT_GE(bytes, 0);
      }
      // Out, which every form keeps: nothing was cut to 63 bits on the way.
      const double out = std::floor(1e7 / static_cast<double>(ranks)) * 128 * 128 * 2;
      EXPECT_GE(static_cast<double>(form.costs.saved_bytes), out);
      EXPECT_GE(form.memory_bytes, out);
    }
    EXPECT_TRUE(find(plan, "ring").runs);
    EXPECT_EQ(find(plan, "laga").runs, ranks <= 128);
  }
  TrainPlanOptions options = v3_options(1, 1, int64_t{1} << 33);
  EXPECT_EQ(refusal(machine, options), "no error");
  options.batch = int64_t{1} << 20;
  EXPECT_THAT(refusal(machine, options), HasSubstr("sequence: expected sizes whose products stay below 2^63"));
  options = v3_options(1, 1, 10'000'000);
  options.attention.kernel = AttentionKernel::kEager;
  EXPECT_GT(planned(machine, options, "explicit").costs.saved_bytes, int64_t{128} * 10'000'000 * 10'000'000);
  options.batch = 100;
  EXPECT_THAT(refusal(machine, options), HasSubstr("sequence: expected sizes"));
}

// The widest config there may be: of what grows with heads, widths of heads and hidden_size at once, a plan holds no
// more than activations, and FLOPs are no integers.
TEST(TrainPlan, WidestHeadsDoNotWrapAround) {
  Machine machine = round_machine();
  machine.memory_bytes = 1e18;
  TrainPlanOptions options = v3_options(1, 1, 1);
  options.dims.d_model = options.dims.d_v = int64_t{1} << 24;
  const auto planned_with = [&](int64_t heads) {
    options.dims.n_heads = heads;
    return plan_train(machine, options);
  };
  const TrainPlan one = planned_with(1), most = planned_with(int64_t{1} << 20);
  for (const char* label : {"explicit", "absorbed", "laga", "laga-q"}) {
    SCOPED_TRACE(label);
    const FormPlan few = find(one, label), many = find(most, label);
    const double out = std::ldexp(2, 44);  // and as much is its gradient
    EXPECT_GE(static_cast<double>(many.costs.saved_bytes), out);
    EXPECT_GE(static_cast<double>(many.peak_bytes - many.costs.saved_bytes), out);
    EXPECT_GT(many.peak_bytes, few.peak_bytes);
    EXPECT_GE(many.forward_flops, std::ldexp(2, 68));  // H V D
    EXPECT_GT(many.compute_s, std::ldexp(2, 68) / 1e12);
  }
}

// Of the batch that is planned; where nothing changes, what holds for these options holds everywhere.
void expect_crossovers(const TrainPlanOptions& options) {
  const Machine machine = load_machine("h800x8-roce");
  const std::vector<Crossover> found = find_crossovers(machine, options);
  ASSERT_EQ(found.size(), 3U);  // laga-q, ring, hybrid
  const auto is_rival = [](TrainForm form) {
    return form == TrainForm::kExplicit || form == TrainForm::kAbsorbed || form == TrainForm::kLaga;
  };
  const auto wins = [&](const Machine& on, const TrainPlanOptions& at, const std::string& form) {
    double own = HUGE_VAL, rival = HUGE_VAL;
    for (const FormPlan& plan : plan_train(on, at).forms) {
      if (name(plan.form) == form) own = std::min(own, plan.total_s());
      if (is_rival(plan.form)) rival = std::min(rival, plan.total_s());
    }
    return own < rival;
  };
  int checked = 0;
  for (const Crossover& at : found) {
    SCOPED_TRACE(fmt::format("{}, batch {}", at.form, options.batch));
    EXPECT_TRUE(at.tokens.at || at.tokens.wins_before == at.wins);
    EXPECT_TRUE(at.bytes_per_s.at || at.bytes_per_s.wins_before == at.wins);
    EXPECT_EQ(at.wins, wins(machine, options, at.form));
    if (at.tokens.at) {
      TrainPlanOptions there = options;
      there.sequence = std::llround(*at.tokens.at * 1.03);
      EXPECT_EQ(wins(machine, there, at.form), !at.tokens.wins_before);
      there.sequence = std::llround(*at.tokens.at / 1.03);
      EXPECT_NE(wins(machine, there, at.form), !at.tokens.wins_before);
      ++checked;
    }
    if (at.bytes_per_s.at) {
      Machine there = machine;
      there.between->bytes_per_s = *at.bytes_per_s.at / 1.03;
      EXPECT_EQ(wins(there, options, at.form), !at.bytes_per_s.wins_before);
      there.between->bytes_per_s = *at.bytes_per_s.at * 1.03;
      EXPECT_NE(wins(there, options, at.form), !at.bytes_per_s.wins_before);
      ++checked;
    }
  }
  EXPECT_GT(checked, 0);
}

TEST(Crossovers, LieWhereTheFasterFormChanges) {
  TrainPlanOptions options = v3_options(16, 2, 8192);
  expect_crossovers(options);
  options.batch = 4;
  expect_crossovers(options);
}

}  // namespace
}  // namespace parlat
