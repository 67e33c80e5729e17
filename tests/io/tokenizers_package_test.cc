// Beside the `tokenizers` package itself: on novels where shared/ lies beside the checkout, on random text, and on
// every character for the classes that patterns are made of.
#include <gtest/gtest.h>

#include <ctime>
#include <iostream>
#include <random>
#include <sstream>

#include "parlat/io/files.h"
#include "parlat/io/regex.h"
#include "parlat/io/tokenizer.h"
#include "tests/python_script.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

fs::path tests_folder() { return PARLAT_TESTS_DIR; }
fs::path shared() { return tests_folder().parent_path().parent_path() / "shared"; }

template <typename Integers>
std::string as_int32(const Integers& values) {
  std::string bytes;
  for (const auto value : values) {
    const auto narrow = static_cast<int32_t>(value);
    bytes.append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
  }
  return bytes;
}

class TokenizersPackage : public ::testing::Test {
 protected:
  void compare(const json& jobs) {
    const fs::path script = tests_folder() / "io/tokenizers_package.py";
    EXPECT_EQ(run_python(script, {folder_.write("jobs.json", jobs.dump()).string()}), "");
  }
  // What parlat makes of a text, for the package to compare.
  json text_job(const Tokenizer& tokenizer, const fs::path& folder, const fs::path& text, const std::string& bytes) {
    const fs::path ids = folder_.write(fmt::format("{}.ids", count_++), as_int32(tokenizer.encode(bytes)));
    return {{"tokenizer", (folder / "tokenizer.json").string()}, {"text", text.string()}, {"ids", ids.string()}};
  }
  TemporaryFolder folder_;
  int count_ = 0;
};

TEST_F(TokenizersPackage, AgreesOnNovels) {
  const fs::path model = shared() / "models/novel", novels = shared() / "data/novels";
  if (!fs::exists(model) || !fs::exists(novels)) GTEST_SKIP() << "no " << model << " or no " << novels;
  const auto tokenizer = load_tokenizer(model);
  json jobs = json::array();
  double bytes = 0, seconds = 0;
  for (const auto& novel : fs::directory_iterator(novels)) {
    const std::string text = read_text(novel.path());
    const std::clock_t begin = std::clock();
    const std::vector<int64_t> tokens = tokenizer->encode(text);
    seconds += static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    bytes += static_cast<double>(text.size());
    EXPECT_EQ(tokenizer->decode(tokens), text);
    jobs.push_back(text_job(*tokenizer, model, novel.path(), text));
  }
  std::cout << fmt::format("{} novels, {:.1f} MB: {:.1f} MB a second of a core\n", jobs.size(), bytes / 1e6,
                           bytes / 1e6 / seconds);
  compare({{"texts", jobs}});
}

// Characters of all kinds in short runs, with the names of tokens between.
std::string random_text(std::mt19937_64& random, size_t pieces) {
  static const std::vector<std::string> kPieces = {" ",
                                                   "  ",
                                                   "\n",
                                                   "\r\n",
                                                   "\t",
                                                   "\u00a0",
                                                   "\u3000",
                                                   "\u0085",
                                                   "\u2028",
                                                   "\u180e",
                                                   "\u200b",
                                                   "a",
                                                   "I",
                                                   "the",
                                                   "\u00e9",
                                                   "e\u0301",
                                                   "\u0301",
                                                   "\u017f",
                                                   "\u00df",
                                                   "\u01c5",
                                                   "\u02b0",
                                                   "\u0416",
                                                   "\u05d0",
                                                   "\u0627\u064b",
                                                   "\u0928\u0940",
                                                   "\u0e2a",
                                                   "\u4e2d\u6587",
                                                   "\u3042",
                                                   "\u30fc",
                                                   "\ud55c",
                                                   "\U00020000",
                                                   "1",
                                                   "23",
                                                   "456",
                                                   "\u0663",
                                                   "\u00b2",
                                                   "\u2167",
                                                   "\u00bd",
                                                   "'s",
                                                   "'S",
                                                   "'ll",
                                                   "'",
                                                   "\u2019",
                                                   "-",
                                                   "--",
                                                   "_",
                                                   ".",
                                                   "...",
                                                   "!?",
                                                   "(",
                                                   ")",
                                                   "{}",
                                                   "#",
                                                   "$",
                                                   "+",
                                                   "=",
                                                   "<",
                                                   ">",
                                                   "|",
                                                   "~",
                                                   "^",
                                                   "`",
                                                   "\\",
                                                   "/",
                                                   "\u00ab",
                                                   "\u20ac",
                                                   "\u2211",
                                                   "\u201c",
                                                   "\u3002",
                                                   "\uff0c",
                                                   "\U0001f600",
                                                   "\U0001f468\u200d\U0001f4bb",
                                                   "\U0001f44d\U0001f3fd",
                                                   "\u263a\ufe0f",
                                                   "\u0001",
                                                   "\x7f",
                                                   "\ufeff",
                                                   "\ufffd",
                                                   "\ue000",
                                                   "<|begin|>",
                                                   "<|end|>",
                                                   "<|tool|>",
                                                   "<|strip|>",
                                                   "word",
                                                   "caf\u00e9",
                                                   "cafe\u0301",
                                                   "<|beginning|>",
                                                   "\u212b",
                                                   "\u1100\u1161"};
  std::string text;
  for (size_t i = 0; i < pieces; ++i) text += kPieces[random() % kPieces.size()];
  return text;
}

TEST_F(TokenizersPackage, AgreesOnRandomText) {
  std::mt19937_64 random(7);
  json jobs = json::array();
  for (const auto& entry : fs::directory_iterator(tests_folder() / "io/tokenizers")) {
    if (!entry.is_directory()) continue;
    const auto tokenizer = load_tokenizer(entry.path());
    const std::string text = random_text(random, 30'000);
    const fs::path file = folder_.write(fmt::format("{}.txt", entry.path().filename().string()), text);
    jobs.push_back(text_job(*tokenizer, entry.path(), file, text));
  }
  compare({{"texts", jobs}});
}

void append_utf8(char32_t c, std::string& text) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
  const auto continuation = [&](int shift) { add(0x80 | ((c >> shift) & 0x3F)); };
  add(c < 0x80 ? c : c < 0x800 ? 0xC0 | c >> 6 : c < 0x10000 ? 0xE0 | c >> 12 : 0xF0 | c >> 18);
  if (c >= 0x10000) continuation(12);
  if (c >= 0x800) continuation(6);
  if (c >= 0x80) continuation(0);
}

// The characters that a class has.
std::vector<char32_t> matched(const std::string& pattern) {
  std::string everything;
  std::vector<char32_t> at;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    const size_t begin = everything.size();
    append_utf8(c, everything);
    at.resize(everything.size());
    at[begin] = c;
  }
  const Regex regex(pattern, "class");
  RegexMatcher matcher(regex);
  matcher.start(everything);
  std::vector<char32_t> found;
  while (const auto match = matcher.next()) found.push_back(at[match->begin]);
  return found;
}

TEST_F(TokenizersPackage, AgreesOnEveryCharacter) {
  const std::string unassigned = folder_.write("unassigned", as_int32(matched("\\p{Cn}"))).string();
  json jobs = json::array();
  std::istringstream patterns(
      R"(\s \S \d \w \W \p{L} \p{Lu} \p{Ll} \p{Lm} \p{Lo} \p{M} \p{N} \p{P} \p{S} \p{C} \p{Han} \p{Hiragana})"
      R"( [^\s\p{L}\p{N}] [\p{Lu}\p{M}&&[^\p{Han}]] (?i:s) (?i:[a-z]) .)");
  for (std::string pattern; patterns >> pattern;) {
    const fs::path file = folder_.write(fmt::format("{}.matched", count_++), as_int32(matched(pattern)));
    jobs.push_back({{"pattern", pattern}, {"unassigned", unassigned}, {"matched", file.string()}});
  }
  compare({{"classes", jobs}});
}

// Cut and normalised: alone, and before a mark that composes with many. Not marks among marks: the normaliser of
// `tokenizers` does not know the classes of those that Unicode 14 added.
TEST_F(TokenizersPackage, AgreesOnTextOfEveryCharacter) {
  std::string text;
  for (const char32_t c : matched("[^\\p{Cn}\\p{Co}]")) {
    append_utf8(c, text);
    text += "a";
  }
  for (const char32_t c : matched("[^\\p{Cn}\\p{Co}\\p{M}]")) {
    append_utf8(c, text);
    text += "\u0301";
  }
  json jobs = json::array();
  for (const char* family : {"qwen2", "deepseek_v3"}) {
    const fs::path folder = tests_folder() / "io/tokenizers" / family;
    jobs.push_back(text_job(*load_tokenizer(folder), folder, folder_.write("every.txt", text), text));
  }
  compare({{"texts", jobs}});
}

}  // namespace
}  // namespace parlat
