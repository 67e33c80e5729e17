// The closed forms of plan/ against what the transport counts and the meter measures, for every form of the registry.
#include "parlat/plan/form_costs.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/bench/attention_bench.h"
#include "parlat/plan/machine.h"
#include "parlat/plan/train_plan.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/train/forms.h"
#include "parlat/train/step_record.h"
#include "tests/form_name.h"
#include "tests/run_ranks.h"

namespace parlat {

void PrintTo(TrainForm form, std::ostream* out) { *out << name(form); }

bool operator==(const SentBytes& a, const SentBytes& b) {
  return a.all_to_all == b.all_to_all && a.all_gather == b.all_gather && a.reduce_scatter == b.reduce_scatter &&
         a.all_reduce == b.all_reduce && a.send_recv == b.send_recv;
}
void PrintTo(const SentBytes& sent, std::ostream* out) { *out << to_json(sent); }

namespace {

struct Shape {
  int64_t n_heads, batch, sequence;
  std::optional<int64_t> d_q_latent;
  Sharding sharding;
  at::ScalarType dtype;
};

LayerCase make_case(const Shape& shape) {
  MlaSpec spec;
  spec.dims = {.d_model = 24,
               .n_heads = shape.n_heads,
               .d_nope = 6,
               .d_rope = 4,
               .d_v = 5,
               .d_latent = 12,
               .d_q_latent = shape.d_q_latent};
  return make_layer_case(
      random_mla_weights(spec, 1, shape.dtype),
      {.batch = shape.batch, .sequence = shape.sequence, .documents = 2, .sharding = shape.sharding});
}

FormCosts costs_on(TrainForm form, const AttentionOptions& options, const LayerCase& layer, int ranks, int rank) {
  AttentionShape shape;
  shape.dims = layer.weights.dims();
  shape.batch = layer.batch();
  shape.attention = options;
  shape.rank = rank;
  for (int p = 0; p < ranks; ++p) shape.tokens.push_back(layer.batch() * layer.shards(ranks).count(p));
  shape.element_bytes = layer.x_BSD.element_size();
  return form_costs(form, shape);
}

void expect_costs(TrainForm form, const AttentionOptions& options, const LayerCase& layer, int ranks) {
  run_ranks(ranks, [&](Communicator& comm) {
    const FormCosts want = costs_on(form, options, layer, ranks, comm.rank());
    const RankLayer local = rank_layer(layer, /*requires_grad=*/true, comm);
    const auto attention = make_attention(form, comm, layer.weights.dims(), options);
    MemoryMeter meter;
    const MemoryMeter::Scope scope(meter);
    const Traffic start = comm.traffic();
    const Tensor out = attention->forward(local.weights, local.x_BSD, local.tokens);
    const Traffic forward = comm.traffic() - start;
    comm.barrier("everything sent has been freed");
    EXPECT_EQ(meter.current_bytes() - static_cast<int64_t>(out.nbytes()), want.saved_bytes);
    out.backward(local.grad_out_BSD);
    const Traffic backward = comm.traffic() - start - forward;

    EXPECT_EQ(sent_bytes(forward), want.forward);
    EXPECT_EQ(sent_bytes(backward), want.backward);
    EXPECT_EQ(forward.paper_bytes(), want.paper_bytes);
  });
}

class FormCostsOf : public ::testing::TestWithParam<TrainForm> {
 protected:
  static void expect_costs(const Shape& shape, int ranks) {
    std::vector<AttentionOptions> all = {{}, {.save = SavedKeys::kAll}};
    if (!passes_latents(GetParam())) all.push_back({AttentionKernel::kEager});
    for (int groups = 1; GetParam() == TrainForm::kHybrid && groups <= ranks; ++groups) {
      if (ranks % groups == 0 && ranks / groups <= shape.n_heads) all.push_back({.ring_groups = groups});
    }
    for (const AttentionOptions& options : all) {
      SCOPED_TRACE(fmt::format("kernel {}, save {}, ring groups {}", name(options.kernel), name(options.save),
                               options.ring_groups));
      parlat::expect_costs(GetParam(), options, make_case(shape), ranks);
    }
  }
};

TEST_P(FormCostsOf, EqualTheCountersOnEveryRank) {
  for (const int ranks : {1, 2, 3, 4, 7, 8}) {
    for (const Sharding sharding : {Sharding::kContiguous, Sharding::kZigzag}) {
      for (const int64_t sequence : {16, 29, 3}) {
        SCOPED_TRACE(fmt::format("{} ranks, {}, {} tokens", ranks, name(sharding), sequence));
        expect_costs({11, 2, sequence, 10, sharding, at::kFloat}, ranks);
      }
    }
  }
}

TEST_P(FormCostsOf, EqualTheCountersWithMoreRanksThanHeads) {
  for (const int ranks : {4, 7, 8}) {
    for (const Sharding sharding : {Sharding::kContiguous, Sharding::kZigzag}) {
      SCOPED_TRACE(fmt::format("{} ranks, {}", ranks, name(sharding)));
      const Shape shape{3, 2, 29, 10, sharding, at::kFloat};
      if (passes_latents(GetParam())) {
        expect_costs(shape, ranks);
      } else {
        EXPECT_THROW(expect_costs(shape, ranks), ConfigError);
      }
    }
  }
}

TEST_P(FormCostsOf, EqualTheCountersInEveryDtype) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    SCOPED_TRACE(name(dtype));
    const bool query_latent = GetParam() == TrainForm::kLagaQ;
    expect_costs({8, 1, 24, query_latent ? std::optional<int64_t>(10) : std::nullopt, Sharding::kContiguous, dtype}, 4);
  }
}

// Exchanges one after the other, of a layer's forward and backward pass.
TEST_P(FormCostsOf, TakesTheStepsThatTheTransportCounts) {
  for (const int ranks : {2, 4}) {
    if (GetParam() == TrainForm::kHybrid && ranks == 2) continue;  // no groups of several ranks
    const LayerCase layer = make_case({8, 1, 32, 10, Sharding::kZigzag, at::kFloat});
    int64_t calls = 0;
    run_ranks(ranks, [&](Communicator& comm) {
      const RankLayer local = rank_layer(layer, /*requires_grad=*/true, comm);
      const auto attention = make_attention(GetParam(), comm, layer.weights.dims(), {});
      const Traffic start = comm.traffic();
      attention->forward(local.weights, local.x_BSD, local.tokens).backward(local.grad_out_BSD);
      if (comm.rank() > 0) return;
      for (const Traffic::Entry& entry : (comm.traffic() - start).entries) calls += entry.calls;
    });
    const TrainPlan plan =
        plan_train(load_machine("h800x8-roce"), {.dims = layer.weights.dims(), .ranks = ranks, .sequence = 32});
    const auto same = std::find_if(plan.forms.begin(), plan.forms.end(),
                                   [&](const FormPlan& form) { return form.form == GetParam(); });
    ASSERT_NE(same, plan.forms.end());
    EXPECT_EQ(same->steps, calls) << ranks << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, FormCostsOf, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return test_name(info.param); });

// All ranks together, forward and backward, in bf16 with gradients of latents in fp32.
TEST(RingGroups, AreChosenForTheFewestBytes) {
  const auto sent = [](int ranks, int64_t n_heads, int64_t groups) {
    AttentionShape shape;
    shape.dims = load_model_config("v3").mla.dims;
    shape.dims.n_heads = n_heads;
    shape.tokens.assign(ranks, 5);
    shape.attention.ring_groups = groups;
    int64_t total = 0;
    for (shape.rank = 0; shape.rank < ranks; ++shape.rank) {
      const FormCosts costs = form_costs(TrainForm::kHybrid, shape);
      total += costs.forward.total() + costs.backward.total();
    }
    return total;
  };
  for (const int64_t n_heads : {128, 7, 2}) {
    for (const int ranks : {4, 6, 8, 9, 12, 16}) {
      for (int64_t size = 2; size < ranks && size <= n_heads; ++size) {
        if (ranks % size != 0) continue;
        EXPECT_LE(sent(ranks, n_heads, 0), sent(ranks, n_heads, ranks / size)) << ranks << " ranks, " << size;
      }
    }
  }
}

// LAGA's Table 1 and the ratio by heads, in MB as printed there; DeepSeek-V3's widths.
TEST(PaperBytes, ReproduceTableOne) {
  const auto megabytes = [](TrainForm form, int ranks, int64_t sequence, int64_t heads) {
    AttentionShape shape;
    shape.dims = load_model_config("v3").mla.dims;
    shape.dims.n_heads = heads;
    shape.tokens.assign(ranks, sequence / ranks);
    return static_cast<double>(form_costs(form, shape).paper_bytes) / 1e6;
  };
  struct Cell {
    int ranks;
    int64_t sequence;
    double explicit_mb, laga_mb;
  };
  for (const Cell& cell : {Cell{4, 4096, 251.7, 127.0}, Cell{4, 8192, 503.3, 254.0}, Cell{8, 4096, 146.8, 74.0},
                           Cell{8, 8192, 293.6, 148.0}, Cell{8, 16384, 587.2, 296.0}, Cell{16, 4096, 78.6, 39.6},
                           Cell{16, 8192, 157.3, 79.2}, Cell{16, 16384, 314.6, 158.5}}) {
    EXPECT_NEAR(megabytes(TrainForm::kExplicit, cell.ranks, cell.sequence, 128), cell.explicit_mb, 0.05);
    EXPECT_NEAR(megabytes(TrainForm::kLaga, cell.ranks, cell.sequence, 128), cell.laga_mb, 0.05);
  }
  for (const auto& [heads, ratio] : {std::pair<int64_t, double>{16, 1.88}, {32, 1.94}, {64, 1.97}, {128, 1.98}}) {
    EXPECT_NEAR(megabytes(TrainForm::kExplicit, 8, 4096, heads) / megabytes(TrainForm::kLaga, 8, 4096, heads), ratio,
                0.005);
  }
}

}  // namespace
}  // namespace parlat
