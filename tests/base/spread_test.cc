// The statistics that every measurement is reported with.
#include "parlat/base/spread.h"

#include <gmock/gmock.h>

#include "parlat/base/error.h"

namespace parlat {
namespace {

TEST(Spread, OfOneValueIsThatValue) {
  const Spread spread = spread_of({3.5});
  EXPECT_EQ(spread.min, 3.5);
  EXPECT_EQ(spread.median, 3.5);
  EXPECT_EQ(spread.p90, 3.5);
}

TEST(Spread, DoesNotDependOnOrder) {
  const Spread spread = spread_of({4, 1, 10, 7, 2, 6, 3, 9, 8, 5});
  EXPECT_EQ(spread.min, 1);
  EXPECT_EQ(spread.median, 5.5);
  EXPECT_EQ(spread.p90, 9);  // nine of ten do not exceed it
  EXPECT_EQ(spread_of({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}).p90, 10);
  EXPECT_EQ(spread_of({5, 1, 3}).median, 3);
}

TEST(Spread, OfNothingIsABug) { EXPECT_THROW(spread_of({}), InternalError); }

}  // namespace
}  // namespace parlat
