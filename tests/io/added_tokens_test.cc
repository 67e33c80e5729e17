#include "parlat/io/added_tokens.h"

#include <gmock/gmock.h>

#include <string>

namespace parlat {
namespace {

using Parts = std::vector<std::string>;

// Tokens as [content], text as it is.
Parts parts(const std::vector<AddedToken>& tokens, const std::string& text) {
  const AddedTokens added(tokens);
  Parts found;
  added.cut(
      text,
      [&](int64_t id) {
        for (const AddedToken& token : tokens) {
          if (token.id == id) found.push_back("[" + token.content + "]");
        }
      },
      [&](std::string_view part) { found.emplace_back(part); });
  return found;
}

AddedToken plain(int64_t id, const std::string& content) { return {.id = id, .content = content}; }

TEST(AddedTokens, TheLongestOfTheLeftmostWins) {
  const std::vector<AddedToken> tokens = {plain(1, "<a>"), plain(2, "<a>b"), plain(3, "a>bcd"), plain(4, "b"),
                                          plain(5, "")};
  EXPECT_EQ(parts(tokens, "x<a>bcd"), (Parts{"x", "[<a>b]", "cd"}));
  EXPECT_EQ(parts(tokens, "a>bc<a>"), (Parts{"a>", "[b]", "c", "[<a>]"}));
  EXPECT_EQ(parts(tokens, "<a<a>bb"), (Parts{"<a", "[<a>b]", "[b]"}));
  EXPECT_EQ(parts(tokens, ""), Parts{});
  EXPECT_EQ(parts({}, "text"), Parts{"text"});
}

TEST(AddedTokens, StripsWhiteSpace) {
  const std::vector<AddedToken> tokens = {{.id = 1, .content = "<l>", .lstrip = true},
                                          {.id = 2, .content = "<r>", .rstrip = true}};
  EXPECT_EQ(parts(tokens, "a \u3000\u00a0<l> b"), (Parts{"a", "[<l>]", " b"}));
  EXPECT_EQ(parts(tokens, "a <r>\n\u2028\u0085 b"), (Parts{"a ", "[<r>]", "b"}));
  EXPECT_EQ(parts(tokens, "<r>  <l>  "), (Parts{"[<r>]", "[<l>]", "  "}));
  EXPECT_EQ(parts(tokens, " \xFF <l>\x80"), (Parts{" \xFF", "[<l>]", "\x80"}));
}

TEST(AddedTokens, SingleWordsStandAlone) {
  const std::vector<AddedToken> tokens = {{.id = 1, .content = "word", .single_word = true}, plain(2, "or")};
  EXPECT_EQ(parts(tokens, "word word"), (Parts{"[word]", " ", "[word]"}));
  EXPECT_EQ(parts(tokens, "(word)"), (Parts{"(", "[word]", ")"}));
  // What is no single word is passed over whole.
  EXPECT_EQ(parts(tokens, "words"), Parts{"words"});
  EXPECT_EQ(parts(tokens, "\u00e9word word_ \u4e00word"), Parts{"\u00e9word word_ \u4e00word"});
  EXPECT_EQ(parts(tokens, "\u00b2word\u00bd"), (Parts{"\u00b2", "[word]", "\u00bd"}));
  EXPECT_EQ(parts(tokens, "\xFFword\x80"), (Parts{"\xFF", "[word]", "\x80"}));
}

}  // namespace
}  // namespace parlat
