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
  validate_form(TrainForm::kRing, 16, 8, false, {});
  EXPECT_EQ(possible_train_forms(true), all_train_forms());
  EXPECT_THAT(possible_train_forms(false), ::testing::Not(::testing::Contains(TrainForm::kLagaQ)));
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
