// Units, shares and error texts.
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/base/printable.h"
#include "parlat/base/range.h"
#include "parlat/base/units.h"

namespace parlat {
namespace {

TEST(Units, AreReadable) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1500), "1.5 kB");
  EXPECT_EQ(format_bytes(146.8e6), "146.8 MB");
  EXPECT_EQ(format_bytes(-2e9), "-2.0 GB");
  EXPECT_EQ(format_seconds(0.85), "850 ms");
  EXPECT_EQ(format_seconds(245), "4 min 05 s");
  EXPECT_EQ(format_seconds(7260), "2 h 01 min");
  EXPECT_EQ(format_count(7), "7");
  EXPECT_EQ(format_count(123), "123");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123456), "-123,456");
}

TEST(Printable, ControlCharactersAreShownNotObeyed) {
  EXPECT_EQ(printable("novel, caf\u00e9 \u4f60"), "novel, caf\u00e9 \u4f60");
  EXPECT_EQ(printable("a\x1b[2J\n\tb\x7f"), "a\\x1b[2J\\x0a\\x09b\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J\xc2"),
            "\\x9b2J\xc2");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
}

TEST(Json, ErrorsAreDataErrorsThatBeginWithTheName) {
  EXPECT_EQ(parse_json(R"({"a": [1]})", "x").at("a"), nlohmann::json::array({1}));
  for (const std::string& bad : {std::string("{"), std::string(100, '[') + std::string(100, ']')}) {
    try {
      parse_json(bad, "x.json");
      FAIL() << "accepted";
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("x.json: "));
    }
  }
}

TEST(EvenShare, CoversEverythingOnce) {
  for (const int64_t count : {0, 1, 7, 16, 29}) {
    for (const int64_t parts : {1, 2, 3, 8}) {
      int64_t at = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Range share = even_share(count, parts, i);
        EXPECT_EQ(share.begin, at);
        EXPECT_LE(share.size() - even_share(count, parts, parts - 1).size(), 1);
        at = share.end;
      }
      EXPECT_EQ(at, count);
    }
  }
}

TEST(Errors, CarryTheirExitCode) {
  EXPECT_EQ(ConfigError("x").exit_code(), 2);
  EXPECT_EQ(DataError("x").exit_code(), 3);
  EXPECT_EQ(CommError("x").exit_code(), 4);
  try {
    PARLAT_ASSERT(1 == 2, "value {}", 3);
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1 == 2 does not hold: value 3"));
    EXPECT_EQ(error.exit_code(), 1);
  }
}

}  // namespace
}  // namespace parlat
