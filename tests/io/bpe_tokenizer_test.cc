// Tokens are those of the `tokenizers` package, for tokenizers as published models have them; text comes back from
// them.
#include <gmock/gmock.h>

#include <thread>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/io/tokenizer.h"
#include "parlat/io/utf8.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

fs::path fixtures() { return fs::path(PARLAT_TESTS_DIR) / "io/tokenizers"; }

std::vector<std::string> all_fixtures() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fixtures())) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  return names;
}

// The text of tokens that come one by one.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens) {
  TextStream stream(tokenizer);
  std::string text;
  for (const int64_t token : tokens) {
    const std::string piece = stream.push(token);
    EXPECT_EQ(find_invalid_utf8(piece), std::nullopt) << "not whole characters at token " << token;
    text += piece;
  }
  return text + stream.finish();
}

class Family : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Tokenizer> tokenizer_ = load_tokenizer(fixtures() / GetParam());
  nlohmann::json expected_ = read_json(fixtures() / GetParam() / "expected.json");
};

TEST_P(Family, TokensAreThoseOfTokenizers) {
  ASSERT_GT(expected_.at("cases").size(), 50);
  for (const nlohmann::json& c : expected_.at("cases")) {
    EXPECT_EQ(tokenizer_->encode(c.at("text").get<std::string>()), c.at("ids").get<std::vector<int64_t>>())
        << c.at("text");
  }
  EXPECT_EQ(tokenizer_->prefix(), expected_.at("prefix").get<std::vector<int64_t>>());
}

TEST_P(Family, TextIsThatOfTokenizersWholeAndStreamed) {
  for (const nlohmann::json& c : expected_.at("cases")) {
    const auto tokens = c.at("ids").get<std::vector<int64_t>>();
    const std::string text = replace_invalid_utf8(tokenizer_->decode(tokens));
    EXPECT_EQ(streamed(*tokenizer_, tokens), text);
    if (!c.at("decoded").is_null()) {
      EXPECT_EQ(text, c.at("decoded").get<std::string>());
    }
  }
}

// Bytes that are no UTF-8 come back, wherever they stand.
TEST_P(Family, AnyBytesComeBack) {
  const auto without_added_spaces = [](std::string text) {
    if (GetParam() == "prefix_space") std::erase(text, ' ');
    return text;
  };
  const std::string all_bytes = [] {
    std::string bytes;
    for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
    return bytes;
  }();
  const std::vector<std::string> texts = {"\xFF",
                                          "a\x80\x80 b",
                                          "\xE4\xB8",
                                          "\xE4\xB8 \xF0\x9F\x91",
                                          "  \xC3",
                                          "12\xC3\x28 3",
                                          "\xED\xA0\x80 \xC0\xAF",
                                          "\xEF\xB7\x90\xFF",
                                          "<|begin\xFE|> <|begin|>\xFE",
                                          all_bytes,
                                          "\xF5\xF5'\xFFs \xFE\xFE\n\xFE \n",
                                          all_bytes + all_bytes};
  for (const std::string& text : texts) {
    const std::vector<int64_t> tokens = tokenizer_->encode(text);
    EXPECT_EQ(without_added_spaces(tokenizer_->decode(tokens)), without_added_spaces(text));
    EXPECT_EQ(streamed(*tokenizer_, tokens), replace_invalid_utf8(tokenizer_->decode(tokens)));
  }
}

TEST_P(Family, ReservedTokensAreNamed) {
  const int64_t beyond = tokenizer_->vocab_size();
  EXPECT_EQ(tokenizer_->decode({beyond, 123456789}), fmt::format("<|id {}|><|id 123456789|>", beyond));
  EXPECT_THROW(tokenizer_->decode({-1}), ConfigError);
}

TEST_P(Family, ThreadsShareOne) {
  const std::string text = "Hello, world! 123 春眠不觉晓 <|begin|> hello hello";
  const std::vector<int64_t> want = tokenizer_->encode(text);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) EXPECT_EQ(tokenizer_->encode(text), want);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(All, Family, ::testing::ValuesIn(all_fixtures()), [](const auto& info) { return info.param; });

// One word of many bytes costs no more than n log n: it would take hours otherwise.
TEST(BpeTokenizer, MergesLongWords) {
  const auto tokenizer = load_tokenizer(fixtures() / "llama3");
  const std::string text(1 << 20, 'a');
  const std::vector<int64_t> tokens = tokenizer->encode(text);
  EXPECT_LE(tokens.size(), text.size());
  EXPECT_EQ(tokenizer->decode(tokens), text);
}

// A folder with a fixture's tokenizer, changed.
class LoadTokenizer : public ::testing::Test {
 protected:
  LoadTokenizer() : file_(read_json(fixtures() / "gpt2" / "tokenizer.json")) {}
  std::unique_ptr<Tokenizer> load() {
    folder_.write("tokenizer.json", file_.dump());
    return load_tokenizer(folder_.path());
  }
  std::string error() {
    try {
      load();
    } catch (const DataError& error) {
      return error.what();
    }
    return "no error";
  }
  TemporaryFolder folder_;
  nlohmann::json file_;
};

TEST_F(LoadTokenizer, SaysThatTheFileIsMissing) {
  const auto message = [&] {
    try {
      load_tokenizer(folder_.path());
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message(), HasSubstr("tokenizer.json: expected the tokenizer of the model, got no such file"));
  folder_.write("tiktoken.model", "");
  EXPECT_THAT(message(), HasSubstr("tiktoken.model is there"));
  folder_.write("tokenizer.json", "{");
  EXPECT_THAT(message(), HasSubstr("not JSON"));
  folder_.write("tokenizer.json", std::string(1'000'000, '['));
  EXPECT_THAT(message(), HasSubstr("tokenizer.json"));
}

// The class in tokenizer_config.json is that of another kind of tokenizer in many published models, which drops spaces.
TEST_F(LoadTokenizer, BelievesNoClass) {
  folder_.write(
      "tokenizer_config.json",
      R"({"tokenizer_class": "LlamaTokenizer", "legacy": true, "add_prefix_space": true, "eos_token": null})");
  const std::string text = "  two  spaces, and a\ttab ";
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->encode(text), load_tokenizer(fixtures() / "gpt2")->encode(text));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
}

TEST_F(LoadTokenizer, EndsDocumentsAsItsFilesSay) {
  EXPECT_THROW(load()->end_of_document(), ConfigError);
  folder_.write("config.json", R"({"eos_token_id": [5, 6]})");
  EXPECT_EQ(load()->end_of_document(), 5);
  folder_.write("config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(load()->end_of_document(), 7);
  folder_.write("tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  EXPECT_EQ(load()->end_of_document(), 1);
  folder_.write("tokenizer_config.json", R"({"eos_token": {"content": "<|end|>", "lstrip": false}})");
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("a<|end|>b<|begin|>")), "ab<|begin|>");
  folder_.write("tokenizer_config.json", R"({"eos_token": "<|nobody|>"})");
  EXPECT_THAT(error(), HasSubstr("tokenizer_config.json: eos_token: expected a token of tokenizer.json, got "
                                 "\"<|nobody|>\""));
}

TEST_F(LoadTokenizer, GivesItsFilesBack) {
  folder_.write("tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  const auto files = load()->files();
  const TemporaryFolder copy;
  for (const auto& [name, bytes] : files) copy.write(name, bytes);
  const auto again = load_tokenizer(copy.path());
  EXPECT_EQ(again->end_of_document(), 1);
  EXPECT_EQ(again->encode("the same tokens"), load()->encode("the same tokens"));
}

TEST_F(LoadTokenizer, NamesReservedIdsInside) {
  file_["added_tokens"].push_back({{"id", 1900}, {"content", "<|far|>"}, {"normalized", false}, {"special", true}});
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->vocab_size(), 1901);
  EXPECT_THAT(tokenizer->encode("<|far|>"), ElementsAre(1900));
  EXPECT_EQ(tokenizer->decode({1899, 1900}), "<|id 1899|><|far|>");
}

TEST_F(LoadTokenizer, RefusesTextWithoutTokens) {
  file_["model"]["vocab"].erase("Z");
  file_["model"]["merges"] = nlohmann::json::array();
  const auto tokenizer = load();
  EXPECT_THAT(tokenizer->encode(""), IsEmpty());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("ABC")), "ABC");
  EXPECT_THROW(tokenizer->encode("XYZ"), DataError);
}

// What transformers and parlat read back are bytes again.
TEST(ByteTokenizerFiles, ReadBackAsBytes) {
  const auto bytes = make_byte_tokenizer();
  const TemporaryFolder folder;
  for (const auto& [name, content] : bytes->files()) folder.write(name, content);
  const auto read = load_tokenizer(folder.path());
  EXPECT_EQ(read->vocab_size(), bytes->vocab_size());
  EXPECT_EQ(read->end_of_document(), bytes->end_of_document());
  EXPECT_THAT(read->prefix(), IsEmpty());
  std::string text = "text 123 \xE4\xB8\xAD\n";
  for (int i = 0; i < 256; ++i) text += static_cast<char>(i);
  EXPECT_EQ(read->encode(text), bytes->encode(text));
  std::vector<int64_t> tokens = bytes->encode(text);
  tokens.push_back(bytes->end_of_document());
  EXPECT_EQ(read->decode(tokens), text);
}

}  // namespace
}  // namespace parlat
