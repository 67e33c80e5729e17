#include "parlat/train/schedule.h"

#include <gtest/gtest.h>

#include "parlat/base/error.h"

namespace parlat {
namespace {

TEST(LearningRateTest, WarmsUpToThePeakInALine) {
  const LearningRate rate{.schedule = Schedule::kConstant, .peak = 0.4, .warmup = 4, .steps = 10};
  EXPECT_DOUBLE_EQ(rate.at(0), 0.1);
  EXPECT_DOUBLE_EQ(rate.at(2), 0.3);
  EXPECT_DOUBLE_EQ(rate.at(3), 0.4);
  EXPECT_DOUBLE_EQ(rate.at(9), 0.4);
}

TEST(LearningRateTest, CosineIsHalfwayInTheMiddleAndEndsAtTheMinimum) {
  const LearningRate rate{.schedule = Schedule::kCosine, .peak = 1.0, .minimum = 0.2, .warmup = 2, .steps = 11};
  EXPECT_DOUBLE_EQ(rate.at(2), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(6), 0.6);
  EXPECT_DOUBLE_EQ(rate.at(10), 0.2);
}

TEST(LearningRateTest, WsdStaysAtThePeakUntilTheLastFifth) {
  const LearningRate rate{.schedule = Schedule::kWsd, .peak = 1.0, .minimum = 0.0, .warmup = 10, .steps = 101};
  EXPECT_DOUBLE_EQ(rate.at(10), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(80), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(90), 0.5);
  EXPECT_DOUBLE_EQ(rate.at(100), 0.0);
}

TEST(LearningRateTest, SurvivesRunsShorterThanTheirWarmUp) {
  for (const Schedule schedule : {Schedule::kConstant, Schedule::kCosine, Schedule::kWsd}) {
    const LearningRate rate{.schedule = schedule, .peak = 1.0, .warmup = 5, .steps = 1};
    EXPECT_DOUBLE_EQ(rate.at(0), 0.2) << name(schedule);
  }
  const LearningRate one_step{.schedule = Schedule::kCosine, .peak = 1.0, .steps = 1};
  EXPECT_DOUBLE_EQ(one_step.at(0), 1.0);
}

TEST(LearningRateTest, RefusesAnUnknownSchedule) {
  try {
    parse_schedule("linear");
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "schedule: expected one of constant, cosine, wsd, got 'linear'");
  }
}

}  // namespace
}  // namespace parlat
