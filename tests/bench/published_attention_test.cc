// The LAGA paper's peaks (arXiv 2607.17644, Tables 2 and 4, DeepSeek-V3's dimensions, bf16), taken apart: what absorbed
// takes beyond explicit follows from how its prototype writes attention.
#include "parlat/bench/published_attention.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/bench/attention_bench.h"
#include "tests/expect_close.h"
#include "tests/form_name.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

constexpr double kMegabyte = 1e6;

// Megabytes by form of one shape, written as published.
std::map<TrainForm, double> peaks(AttentionKernel kernel, int ranks, int64_t sequence, int64_t n_heads = 128,
                                  int64_t d_model = 7168) {
  AttentionBenchOptions options;
  options.spec = load_model_config("v3").mla;
  options.spec.dims.n_heads = n_heads;
  options.spec.dims.d_model = d_model;
  options.spec.dims.d_q_latent = {};  // section 4.1
  options.forms = {TrainForm::kExplicit, TrainForm::kAbsorbed, TrainForm::kLaga};
  options.sequences = {sequence};
  options.dtype = at::kBFloat16;
  options.attention.kernel = kernel;
  options.dry_run = options.as_published = true;
  std::map<TrainForm, double> megabytes;
  for (const AttentionBenchRow& row : bench_attention(options, [&](const auto& body) { run_ranks(ranks, body); })) {
    megabytes[row.form] = static_cast<double>(row.peak_activation_bytes) / kMegabyte;
  }
  return megabytes;
}

struct Cell {
  AttentionKernel kernel;
  int ranks;
  int64_t sequence;
  double explicit_mb, absorbed_mb;
};

class PublishedPeaks : public ::testing::TestWithParam<Cell> {};

TEST_P(PublishedPeaks, DifferAsPublished) {
  const Cell& cell = GetParam();
  const std::map<TrainForm, double> ours = peaks(cell.kernel, cell.ranks, cell.sequence);
  const double want = cell.absorbed_mb - cell.explicit_mb;
  EXPECT_NEAR(ours.at(TrainForm::kAbsorbed) - ours.at(TrainForm::kExplicit), want, 0.1 * want);
  if (cell.kernel == AttentionKernel::kEager) {
    EXPECT_NEAR(ours.at(TrainForm::kLaga) / ours.at(TrainForm::kExplicit), 1, 0.005);
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, PublishedPeaks,
                         ::testing::Values(Cell{AttentionKernel::kEager, 4, 4096, 4620, 5900},
                                           Cell{AttentionKernel::kEager, 4, 8192, 14463, 19409},
                                           Cell{AttentionKernel::kEager, 8, 4096, 2917, 3493},
                                           Cell{AttentionKernel::kEager, 8, 8192, 7842, 10207},
                                           Cell{AttentionKernel::kEager, 8, 16384, 27348, 36596},
                                           Cell{AttentionKernel::kFused, 8, 4096, 1796, 3387},
                                           Cell{AttentionKernel::kFused, 8, 8192, 2214, 7541},
                                           Cell{AttentionKernel::kFused, 8, 16384, 3044, 22281}));

// Section 4.3: by heads, 2048 wide.
TEST(PublishedPeaksByHeads, DifferAsPublished) {
  for (const auto& [heads, want] : {std::pair<int64_t, double>{16, 337}, {32, 657}, {64, 1269}, {128, 2512}}) {
    const std::map<TrainForm, double> ours = peaks(AttentionKernel::kEager, 8, 8192, heads, 2048);
    EXPECT_NEAR(ours.at(TrainForm::kAbsorbed) - ours.at(TrainForm::kExplicit), want, 0.05 * want) << heads;
  }
}

// They are the functions that they claim to be; without a mask.
TEST(PublishedAttention, EagerAgreesWithTheOracle) {
  MlaSpec spec;
  spec.dims = {.d_model = 48, .n_heads = 4, .d_nope = 16, .d_rope = 8, .d_v = 16, .d_latent = 32, .d_q_latent = 24};
  const LayerCase layer = make_layer_case(random_mla_weights(spec, 1, at::kFloat), {.sequence = 24});
  const OracleResult want =
      oracle_forward_backward(layer.weights, layer.x_BSD, layer.grad_out_BSD, layer.documents, /*causal=*/false);
  const Tolerance tolerance = Tolerance::rounding(at::kFloat, 64, 12);
  run_ranks(2, [&](Communicator& comm) {
    for (const TrainForm form : {TrainForm::kExplicit, TrainForm::kAbsorbed, TrainForm::kLaga}) {
      SCOPED_TRACE(name(form));
      const RankLayer local = rank_layer(layer, /*requires_grad=*/true, comm);
      const PublishedAttention attention(form, comm, spec.dims, {AttentionKernel::kEager});
      const Tensor out = attention.forward(local.weights, local.x_BSD, local.tokens);
      out.backward(local.grad_out_BSD);
      EXPECT_CLOSE(out, local_tokens(want.out, local.tokens.shards, comm.rank()), tolerance);
      EXPECT_CLOSE(local.x_BSD.grad(), local_tokens(want.gradients.at("x"), local.tokens.shards, comm.rank()),
                   tolerance);
    }
  });
}

TEST(PublishedAttention, RefusesOtherForms) {
  const MlaDims dims = load_model_config("v3").mla.dims;
  EXPECT_THROW(
      run_ranks(1, [&](Communicator& comm) { PublishedAttention(TrainForm::kRing, comm, dims, AttentionOptions{}); }),
      ConfigError);
}

}  // namespace
}  // namespace parlat
