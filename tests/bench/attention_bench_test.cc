// The harness itself: what it measures is what happened, and a wrong result is not timed as if it were right.
#include "parlat/bench/attention_bench.h"

#include <gmock/gmock.h>

#include "tests/form_name.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

AttentionBenchOptions small_options() {
  AttentionBenchOptions options;
  MlaDims& d = options.spec.dims;
  d.d_model = 48;
  d.n_heads = 4;
  d.d_nope = 16;
  d.d_rope = 8;
  d.d_v = 16;
  d.d_latent = 32;
  d.d_q_latent = 24;
  options.forms = all_train_forms();
  options.sequences = {40};
  options.repeats = 3;
  options.verify_sequence = 24;
  return options;
}

RankRunner local(int ranks) {
  return [ranks](const auto& body) { run_ranks(ranks, body); };
}

TEST(AttentionBench, CoversTheGridInOrder) {
  AttentionBenchOptions options = small_options();
  options.heads = {4, 2};
  options.sequences = {16, 40};
  options.documents = 2;
  options.sharding = Sharding::kZigzag;
  std::vector<std::string> seen;
  const auto rows = bench_attention(options, local(2), [&](const std::string& what) { seen.push_back(what); });
  EXPECT_THAT(seen, ::testing::ElementsAre("4 heads, 16 tokens", "4 heads, 40 tokens", "2 heads, 16 tokens",
                                           "2 heads, 40 tokens"));
  ASSERT_EQ(rows.size(), 4 * all_train_forms().size());
  size_t i = 0;
  for (const int64_t heads : {4, 2}) {
    for (const int64_t sequence : {16, 40}) {
      for (const TrainForm form : all_train_forms()) {
        const AttentionBenchRow& row = rows[i++];
        EXPECT_EQ(row.form, form);
        EXPECT_EQ(row.heads, heads);
        EXPECT_EQ(row.sequence, sequence);
        EXPECT_EQ(row.ranks, 2);
        EXPECT_EQ(row.verified_sequence, std::min<int64_t>(sequence, 24));
        EXPECT_TRUE(row.check.ok) << name(form) << ": " << row.check.text();
        EXPECT_GT(row.check.max_error, 0);
        EXPECT_LE(row.ms.min, row.ms.median);
        EXPECT_LE(row.ms.median, row.ms.p90);
        EXPECT_DOUBLE_EQ(row.tokens_per_s, static_cast<double>(sequence) / row.ms.median * 1e3);
      }
    }
  }
}

TEST(AttentionBench, VerifiesWhatTheOracleHasTimeForAndSeveralBlocks) {
  const MlaDims small = small_options().spec.dims, v3 = load_model_config("v3").mla.dims;
  EXPECT_EQ(verification_length(v3, 1, 100), 100);
  EXPECT_EQ(verification_length(v3, 1, 4096), 513);
  EXPECT_EQ(verification_length(small, 1, 4096), 4096);
  const int64_t of_one = verification_length(small, 1, 1 << 20);
  EXPECT_GT(of_one, 4096);
  EXPECT_LT(of_one, 1 << 15);
  EXPECT_LT(verification_length(small, 4, 1 << 20), of_one);
}

TEST(AttentionBench, BytesOfUnevenRanksAreTheLargest) {
  AttentionBenchOptions options = small_options();
  options.heads = {7};
  options.sequences = {29};
  for (const AttentionBenchRow& row : bench_attention(options, local(3))) {
    SentBytes want, want_forward;
    for (int rank = 0; rank < 3; ++rank) {
      AttentionShape shape;
      shape.dims = options.spec.dims;
      shape.dims.n_heads = 7;
      shape.tokens = {10, 10, 9};
      shape.rank = rank;
      shape.element_bytes = 4;
      const FormCosts costs = form_costs(row.form, shape);
      want_forward.all_to_all = std::max(want_forward.all_to_all, costs.forward.all_to_all);
      want.all_to_all = std::max(want.all_to_all, costs.forward.all_to_all + costs.backward.all_to_all);
      want.reduce_scatter = std::max(want.reduce_scatter, costs.backward.reduce_scatter);
    }
    EXPECT_EQ(row.sent_forward.all_to_all, want_forward.all_to_all) << name(row.form);
    EXPECT_EQ(row.sent.all_to_all, want.all_to_all) << name(row.form);
    EXPECT_EQ(row.sent.reduce_scatter, want.reduce_scatter) << name(row.form);
  }
}

// Not the model's.
TEST(AttentionBench, HeadsOfTheGridDecideWhatIsPossible) {
  AttentionBenchOptions options = small_options();
  options.heads = {6};
  for (const AttentionBenchRow& row : bench_attention(options, local(6))) EXPECT_TRUE(row.check.ok) << name(row.form);
  options.heads = {1};
  options.forms = {TrainForm::kRing, TrainForm::kHybrid};  // which splits one head over no group
  for (const AttentionBenchRow& row : bench_attention(options, local(4))) EXPECT_TRUE(row.check.ok) << name(row.form);
}

TEST(AttentionBench, Fp64IsHeldToItsOwnRounding) {
  AttentionBenchOptions options = small_options();
  options.dtype = at::kDouble;
  options.documents = 2;
  for (const AttentionKernel kernel : {AttentionKernel::kFused, AttentionKernel::kEager}) {
    options.attention.kernel = kernel;
    options.forms = possible_train_forms(/*has_query_latent=*/true, kernel);
    for (const AttentionBenchRow& row : bench_attention(options, local(2))) {
      EXPECT_TRUE(row.check.ok) << name(row.form) << ": " << row.check.text();
      EXPECT_LT(row.check.tolerance, 1e-9);
    }
  }
}

TEST(AttentionBench, ForwardPassSendsNoGradientsAndSavesNothing) {
  AttentionBenchOptions options = small_options();
  options.backward = false;
  const auto forward = bench_attention(options, local(2));
  options.backward = true;
  const auto both = bench_attention(options, local(2));
  for (size_t i = 0; i < forward.size(); ++i) {
    EXPECT_EQ(forward[i].sent.total(), forward[i].sent_forward.total());
    EXPECT_EQ(forward[i].sent.total(), both[i].sent_forward.total());
    EXPECT_EQ(forward[i].paper_bytes, both[i].paper_bytes);
    EXPECT_LT(forward[i].peak_activation_bytes, both[i].peak_activation_bytes) << name(forward[i].form);
  }
}

TEST(AttentionBench, RowsCarryTheKeysOfTheRecord) {
  const AttentionBenchOptions options = small_options();
  const nlohmann::json row = to_json(bench_attention(options, local(2)).back(), options);
  EXPECT_EQ(row["form"], "hybrid");
  EXPECT_EQ(row["kernel"], "fused");
  EXPECT_EQ(row["pass"], "forward+backward");
  EXPECT_EQ(row["dtype"], "fp32");
  EXPECT_EQ(row["ok"], true);
  EXPECT_FALSE(row.contains("error"));
  for (const char* key : {"ranks", "groups", "sequence", "batch", "heads", "tokens_per_s", "paper_bytes",
                          "peak_activation_bytes", "max_error", "tolerance", "verified_sequence"}) {
    EXPECT_TRUE(row[key].is_number()) << key;
  }
  for (const char* key : {"min", "median", "p90"}) EXPECT_TRUE(row["ms"][key].is_number()) << key;
  for (const char* key : {"all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send_recv", "total"}) {
    EXPECT_TRUE(row["sent_bytes"][key].is_number()) << key;
  }
}

// Every rank gets the same verdict, and it is about the tensor that is wrong.
class Verdict : public ::testing::TestWithParam<TrainForm> {
 protected:
  Verdict() : layer_(make_layer_case(random_mla_weights(small_options().spec, 1, at::kFloat), {.sequence = 24})) {}

  std::vector<FormCheck> check_against(const OracleResult& want) {
    std::vector<FormCheck> by_rank(3);
    run_ranks(3, [&](Communicator& comm) { by_rank[comm.rank()] = check_form(GetParam(), {}, layer_, want, comm); });
    return by_rank;
  }

  LayerCase layer_;
};

TEST_P(Verdict, IsOkForTheTrueOracle) {
  for (const FormCheck& check : check_against(oracle_of(layer_))) EXPECT_TRUE(check.ok) << check.text();
}

TEST_P(Verdict, NamesTheTensorThatIsWrongOnOneRankOnly) {
  for (const char* tensor : {"w_ukv", "x"}) {
    OracleResult want = oracle_of(layer_);
    want.gradients.at(tensor).flatten()[0] += want.gradients.at(tensor).abs().max();
    for (const FormCheck& check : check_against(want)) {
      EXPECT_FALSE(check.ok);
      EXPECT_EQ(check.worst, tensor);
      EXPECT_GT(check.max_error, check.tolerance);
      EXPECT_THAT(check.text(), HasSubstr(tensor));
    }
  }
}

// Of one token among many, and by far less than the largest value.
TEST_P(Verdict, IsFailedInBf16ByATokenThatIsMissing) {
  layer_ = make_layer_case(random_mla_weights(small_options().spec, 1, at::kBFloat16), {.sequence = 24});
  for (const FormCheck& check : check_against(oracle_of(layer_))) EXPECT_TRUE(check.ok) << check.text();
  OracleResult want = oracle_of(layer_);
  want.out[0][20].mul_(0.9);
  for (const FormCheck& check : check_against(want)) {
    EXPECT_FALSE(check.ok);
    EXPECT_EQ(check.worst, "out");
  }
}

TEST_P(Verdict, IsFailedByNan) {
  OracleResult want = oracle_of(layer_);
  want.out.flatten()[5] = NAN;
  for (const FormCheck& check : check_against(want)) EXPECT_FALSE(check.ok);
}

INSTANTIATE_TEST_SUITE_P(Forms, Verdict, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace parlat
