#include "parlat/io/utf8.h"

#include <gtest/gtest.h>

namespace parlat {
namespace {

TEST(Utf8, KnowsWholeCharacters) {
  EXPECT_EQ(utf8_character_length("a", 0), 1);
  EXPECT_EQ(utf8_character_length("\u00e9", 0), 2);
  EXPECT_EQ(utf8_character_length("x\u4e00", 1), 3);
  EXPECT_EQ(utf8_character_length("\U0010ffff", 0), 4);
  for (const char* text :
       {"\x80", "\xC0\xAF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE4\xB8"}) {
    EXPECT_EQ(utf8_character_length(text, 0), 0);
  }
  EXPECT_EQ(utf8_character_length("", 0), 0);
}

TEST(Utf8, KnowsBeginningsOfCharacters) {
  EXPECT_EQ(utf8_partial_length("\xC3", 0), 1);
  EXPECT_EQ(utf8_partial_length("\xE0", 0), 1);
  EXPECT_EQ(utf8_partial_length("\xED", 0), 1);
  EXPECT_EQ(utf8_partial_length("\xE4\xB8", 0), 2);
  EXPECT_EQ(utf8_partial_length("\xE4\xB8x", 0), 2);
  EXPECT_EQ(utf8_partial_length("\xF0\x9F\x91", 0), 3);
  EXPECT_EQ(utf8_partial_length("\xF4\x8F", 0), 2);
  EXPECT_EQ(utf8_partial_length("\xF4\x90", 0), 1);
  EXPECT_EQ(utf8_partial_length("\xED\xA0", 0), 1);
  EXPECT_EQ(utf8_partial_length("\xE0\x9F", 0), 1);
  for (const char* text : {"a", "\x80", "\xC1", "\xF5", "\u4e00"}) EXPECT_EQ(utf8_partial_length(text, 0), 0);
}

// The examples of the Unicode standard, 3.9: one replacement for each longest beginning of a character.
TEST(Utf8, ReplacesWhatIsInvalid) {
  const std::string r = "\uFFFD";
  EXPECT_EQ(replace_invalid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(replace_invalid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(replace_invalid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(replace_invalid_utf8("whole \u4e00"), "whole \u4e00");
  EXPECT_EQ(replace_invalid_utf8("cut \xF0\x9F"), "cut " + r);
}

}  // namespace
}  // namespace parlat
