// Patterns mean what they mean to the `tokenizers` package (the pieces below are its own), or are refused.
#include "parlat/io/pre_tokenizer.h"

#include <gmock/gmock.h>

#include <chrono>
#include <string>

#include "parlat/base/error.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using Pieces = std::vector<std::string>;

Pieces pieces(const PreTokenizer& rules, const std::string& text) {
  Pieces words;
  rules.cut(text, [&](std::string_view word, bool space_before) {
    words.push_back((space_before ? "+" : "") + std::string(word));
  });
  return words;
}

Split split(const std::string& pattern, SplitBehavior behavior = SplitBehavior::kIsolated, bool invert = false) {
  return {.pattern = Regex(pattern, "pattern"), .behavior = behavior, .invert = invert};
}

Pieces isolated(const std::string& pattern, const std::string& text) {
  PreTokenizer rules;
  rules.splits.push_back(split(pattern));
  return pieces(rules, text);
}

TEST(Oniguruma, IntervalsWithASuffixAreQuantifiedAgain) {
  EXPECT_EQ(isolated("x{1,2}+", "axxxxxb"), (Pieces{"a", "xxxxx", "b"}));
  EXPECT_EQ(isolated("x{2}?", "axxxxxb"), (Pieces{"a", "xx", "xx", "x", "b"}));
  EXPECT_EQ(isolated("(?:xy){1,2}+", "axyxyxyb"), (Pieces{"a", "xyxyxy", "b"}));
  EXPECT_EQ(isolated("x{,2}", "axxxb"), (Pieces{"a", "xx", "x", "b"}));
  EXPECT_EQ(isolated("x{2,3}?", "xxxxx"), (Pieces{"xx", "xx", "x"}));
  EXPECT_EQ(isolated("a{x", "a{xa"), (Pieces{"a{x", "a"}));
}

TEST(Oniguruma, LinesEndWhereItSaysSo) {
  EXPECT_EQ(isolated("a$", "ba\nba"), (Pieces{"b", "a", "\nb", "a"}));
  EXPECT_EQ(isolated("^b", "ba\nba"), (Pieces{"b", "a\n", "b", "a"}));
  EXPECT_EQ(isolated("a.c", "a\nc abc"), (Pieces{"a\nc ", "abc"}));
}

TEST(Oniguruma, SetsHaveOperations) {
  EXPECT_EQ(isolated("[a-z&&[^aeiou]]+", "hello world"), (Pieces{"h", "e", "ll", "o ", "w", "o", "rld"}));
  EXPECT_EQ(isolated("[^a-z&&[^aeiou]]+", "hello world"), (Pieces{"h", "e", "ll", "o ", "w", "o", "rld"}));
  EXPECT_EQ(isolated("[a[bc]]", "]a 1b*"), (Pieces{"]", "a", " 1", "b", "*"}));
  EXPECT_EQ(isolated("[^a[bc]]+", "]a 1b*"), (Pieces{"]", "a", " 1", "b", "*"}));
  EXPECT_EQ(isolated("[]a]", "]a 1"), (Pieces{"]", "a", " 1"}));
  EXPECT_EQ(isolated("[+--]", "a-,b"), (Pieces{"a", "-", ",", "b"}));
  EXPECT_EQ(isolated("[a&b]", "a&c"), (Pieces{"a", "&", "c"}));
}

TEST(Oniguruma, EscapesAreItsOwn) {
  EXPECT_EQ(isolated("\\h+", "xyz12fg"), (Pieces{"xyz", "12f", "g"}));
  EXPECT_EQ(isolated("\\v", "a\n\vb"), (Pieces{"a\n", "\v", "b"}));
  EXPECT_EQ(isolated("\\u4e00", "a\u4e00"), (Pieces{"a", "\u4e00"}));
  EXPECT_EQ(isolated("\\x{4e00}|\\x41", "A\u4e00b"), (Pieces{"A", "\u4e00", "b"}));
  EXPECT_EQ(isolated("\\s+", "a \u180e b"), (Pieces{"a", " ", "\u180e", " ", "b"}));
  EXPECT_EQ(isolated("\\S+", "a \u180e\u0085b"), (Pieces{"a", " ", "\u180e", "\u0085", "b"}));
  EXPECT_EQ(isolated("[^\\S\\n]+", "a \n b"), (Pieces{"a", " ", "\n", " ", "b"}));
  EXPECT_EQ(isolated("\\p{^L}+", "ab12c"), (Pieces{"ab", "12", "c"}));
  EXPECT_EQ(isolated("\\p{han}+", "ab\u4e00\u3005c"), (Pieces{"ab", "\u4e00\u3005", "c"}));
  EXPECT_EQ(isolated("(?i:'s|'t)", "it'S it'\u017f 'T"), (Pieces{"it", "'S", " it", "'\u017f", " ", "'T"}));
}

TEST(Oniguruma, EmptyMatchesCut) {
  EXPECT_EQ(isolated("x*", "aab"), (Pieces{"a", "a", "b"}));
  EXPECT_EQ(isolated("", "a\u4e00b"), (Pieces{"a", "\u4e00", "b"}));
}

TEST(Oniguruma, RefusesWhatItCannotKeep) {
  for (const std::string pattern :
       {"(?m:a.)", "(?<n>a)",       "(?#c)a", "a(?i)b|c",    "(*FAIL)",     "\\b",     "\\K",     "\\G",     "\\X",
        "\\R",     "\\1",           "\\pL",   "\\p{Sc=Han}", "[[:alpha:]]", "[a-\\d]", "[\\d-a]", "[a-c-e]", "[^]",
        "[",       "a**",           "*a",     "(a",          "a)",          "\\",      "[a&&]",   "\\u12",   "\\x{",
        "[\\W]",   "\\p{Nonsense}", "x{2,1}", "x{99999}",    "(?<=a+)b",    "(?s:.)",  "\\Qa"}) {
    EXPECT_THROW(isolated(pattern, "a"), DataError) << pattern;
  }
  std::string nested(1000, '('), sets(1000, '[');
  EXPECT_THROW(isolated(nested, "a"), DataError);
  EXPECT_THROW(isolated(sets, "a"), DataError);
}

TEST(Oniguruma, ErrorsSayWhatAndWhere) {
  const auto error = [](const std::string& pattern) {
    try {
      isolated(pattern, "a");
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error("a\\Kb"), "pattern: the escape \"\\\\K\" in the pattern \"a\\\\Kb\" at byte 1 is not supported");
  EXPECT_EQ(error("x{2,1}"), "pattern: \"x{2,1}\" is no pattern: numbers out of order in {} quantifier");
}

// Nothing that a file may ask for runs without end.
TEST(Regex, HostilePatternsEnd) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(isolated("(?:a*)*[bc]", std::string(200, 'a')), DataError);
  EXPECT_THROW(isolated("(?:a|aa)+[bc]", std::string(5000, 'a')), DataError);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

// Runs that are long, not hostile.
TEST(Regex, LongRunsMatch) {
  const std::string run(1 << 22, 'a'), spaces(1 << 20, ' ');
  EXPECT_EQ(isolated("\\p{L}+", run).size(), 1);
  EXPECT_EQ(isolated("(?:a|b)+", std::string(100'000, 'a')).size(), 1);
  EXPECT_EQ(isolated("\\s+(?!\\S)|\\s+", spaces + "x").size(), 3);
}

TEST(PreTokenizer, JoinsWhatItMatches) {
  const auto with = [](SplitBehavior behavior, bool invert) {
    PreTokenizer rules;
    rules.splits.push_back(split("-", behavior, invert));
    return pieces(rules, "-the-final--countdown-");
  };
  using enum SplitBehavior;
  EXPECT_EQ(with(kIsolated, false), (Pieces{"-", "the", "-", "final", "-", "-", "countdown", "-"}));
  EXPECT_EQ(with(kRemoved, false), (Pieces{"the", "final", "countdown"}));
  EXPECT_EQ(with(kMergedWithPrevious, false), (Pieces{"-", "the-", "final-", "-", "countdown-"}));
  EXPECT_EQ(with(kMergedWithNext, false), (Pieces{"-the", "-final", "-", "-countdown", "-"}));
  EXPECT_EQ(with(kContiguous, false), (Pieces{"-", "the", "-", "final", "--", "countdown", "-"}));
  EXPECT_EQ(with(kIsolated, true), with(kIsolated, false));
  EXPECT_EQ(with(kRemoved, true), (Pieces{"-", "-", "-", "-", "-"}));
  EXPECT_EQ(with(kMergedWithPrevious, true), (Pieces{"-the", "-final", "-", "-countdown", "-"}));
  EXPECT_EQ(with(kMergedWithNext, true), (Pieces{"-", "the-", "final-", "-", "countdown-"}));
  EXPECT_EQ(with(kContiguous, true), with(kContiguous, false));
}

TEST(PreTokenizer, LaterSplitsSeeOnePieceOnly) {
  PreTokenizer rules;
  rules.splits.push_back(split("\\p{N}"));
  rules.splits.push_back(split("\\s+(?!\\S)|\\s+"));
  // The spaces before 1 are the end of their piece.
  EXPECT_EQ(pieces(rules, "a   1   b"), (Pieces{"a", "   ", "1", "  ", " ", "b"}));
}

TEST(PreTokenizer, AddsASpaceToPiecesWithoutOne) {
  PreTokenizer rules;
  rules.splits.push_back(split(","));
  rules.add_prefix_space = true;
  EXPECT_EQ(pieces(rules, "a, b"), (Pieces{"+a", "+,", " b"}));
  rules.space_splits.push_back(split(" ?\\p{L}+|\\s"));
  EXPECT_EQ(pieces(rules, "ab1c, d"), (Pieces{"+ab", "1", "c", "+", ",", " d"}));
}

TEST(PreTokenizer, LiteralsAreNoPatterns) {
  PreTokenizer rules;
  rules.splits.push_back({.pattern = Regex::literal(".*", "literal")});
  EXPECT_EQ(pieces(rules, "a.*b.."), (Pieces{"a", ".*", "b.."}));
}

// Each byte that is no UTF-8 is a character in no class.
TEST(PreTokenizer, BrokenBytesAreCharacters) {
  EXPECT_EQ(isolated("\\p{L}+|\\s+(?!\\S)|\\s+", "ab\xFF\xE4\xB8  \xC3 c"),
            (Pieces{"ab", "\xFF\xE4\xB8", " ", " ", "\xC3", " ", "c"}));
  EXPECT_EQ(isolated("[^\\p{L}]", "a\xFF\xFE\u4e00"), (Pieces{"a", "\xFF", "\xFE", "\u4e00"}));
  EXPECT_EQ(isolated("\\ufdd0", "\xFF\ufdd0"), (Pieces{"\xFF", "\ufdd0"}));
  EXPECT_THAT(isolated("a", "\xFF"), ElementsAre("\xFF"));
}

}  // namespace
}  // namespace parlat
