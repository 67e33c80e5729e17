#include "parlat/config/parallel.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

template <typename Body>
std::string config_error(Body body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(Parallel, NamesRoundTrip) {
  for (const TrainForm form : all_train_forms()) EXPECT_EQ(parse_train_form(name(form)), form);
  for (const Sharding s : {Sharding::kContiguous, Sharding::kZigzag}) EXPECT_EQ(parse_sharding(name(s)), s);
}

TEST(Parallel, UnknownNamesAreRefusedWithThePossibleOnes) {
  EXPECT_THAT(config_error([] { parse_train_form("lagaa"); }), HasSubstr("got 'lagaa'"));
  EXPECT_THAT(config_error([] { parse_train_form("lagaa"); }), HasSubstr("explicit, absorbed, laga"));
  EXPECT_THAT(config_error([] { parse_sharding("ring"); }), HasSubstr("contiguous, zigzag"));
}

TEST(Parallel, FormsSayWhatTheyNeed) {
  EXPECT_THAT(config_error([] { validate_form(TrainForm::kLagaQ, 2, 8, false, {}); }), HasSubstr("a query latent"));
  EXPECT_THAT(config_error([] { validate_form(TrainForm::kRing, 2, 8, false, {AttentionKernel::kEager}); }),
              HasSubstr("kernel fused"));
  EXPECT_THAT(config_error([] { validate_form(TrainForm::kHybrid, 2, 8, false, {AttentionKernel::kEager}); }),
              HasSubstr("kernel fused"));
  for (const TrainForm form : {TrainForm::kRing, TrainForm::kHybrid}) validate_form(form, 16, 8, false, {});
  EXPECT_EQ(possible_train_forms(true), all_train_forms());
  EXPECT_THAT(possible_train_forms(false), ::testing::Not(::testing::Contains(TrainForm::kLagaQ)));
  EXPECT_THAT(possible_train_forms(true, AttentionKernel::kEager),
              ::testing::ElementsAre(TrainForm::kExplicit, TrainForm::kAbsorbed, TrainForm::kLaga, TrainForm::kLagaQ));
}

TEST(Parallel, HybridsGroupsMustFit) {
  const auto hybrid = [](int64_t ranks, int64_t n_heads, int64_t groups) {
    return config_error([&] { validate_form(TrainForm::kHybrid, ranks, n_heads, false, {.ring_groups = groups}); });
  };
  EXPECT_EQ(hybrid(6, 3, 2), "nothing thrown");
  EXPECT_EQ(hybrid(6, 3, 4), "form hybrid: expected ring-groups that divide the 6 sequence ranks, or 0, got 4");
  EXPECT_THAT(hybrid(6, 3, -1), HasSubstr("got -1"));
  EXPECT_EQ(hybrid(8, 3, 2), "form hybrid: expected at most 3 ranks a group, since they split the 3 heads, got 4");
  validate_form(TrainForm::kLaga, 3, 8, false, {.ring_groups = 2});  // hybrid's alone
}

TEST(Parallel, RingGroups) {
  const auto chosen = [](int64_t ranks, int64_t n_heads) {
    return ring_groups(TrainForm::kHybrid, ranks, n_heads, {});
  };
  EXPECT_EQ(chosen(8, 16), 4);
  EXPECT_EQ(chosen(9, 16), 3);
  EXPECT_EQ(chosen(9, 2), 9);  // three ranks can't split two heads
  EXPECT_EQ(chosen(8, 1), 8);
  for (const int64_t prime : {1, 2, 3, 7}) EXPECT_EQ(chosen(prime, 16), prime);
  EXPECT_EQ(ring_groups(TrainForm::kHybrid, 8, 16, {.ring_groups = 1}), 1);
  EXPECT_EQ(ring_groups(TrainForm::kRing, 8, 16, {.ring_groups = 2}), 8);
}

TEST(Parallel, TheMeshMustFit) {
  validate({.data = 2, .sequence = 4, .expert = 2}, 8, 16, 8);
  EXPECT_THAT(config_error([] { validate({.data = 2, .sequence = 2}, 8, 16, 8); }), HasSubstr("2 x 2 = 4"));
  EXPECT_THAT(config_error([] { validate({.data = 0, .sequence = 2}, 2, 16, 8); }), HasSubstr("at least 1"));
  EXPECT_THAT(config_error([] { validate({.sequence = 4, .expert = 3}, 4, 16, 8); }), HasSubstr("divide the 4 ranks"));
  EXPECT_THAT(config_error([] { validate({.sequence = 8, .expert = 8}, 8, 16, 4); }), HasSubstr("at most 4 expert"));
}

TEST(Parallel, ADenseModelHasNoExpertsToSplit) {
  validate({.sequence = 4}, 4, 16, 0);
  for (const int64_t expert : {2, 3}) {
    EXPECT_THAT(config_error([&] { validate({.sequence = 4, .expert = expert}, 4, 16, 0); }),
                HasSubstr(fmt::format("since the model has no experts to split, got {}", expert)));
  }
}

TEST(Parallel, MoreSequenceRanksThanHeads) {
  const ParallelSpec spec{.sequence = 8, .form = TrainForm::kLaga};
  EXPECT_THAT(config_error([&] { validate(spec, 8, 7, 0); }),
              HasSubstr("form laga: expected at most 7 sequence ranks"));
}

}  // namespace
}  // namespace parlat
