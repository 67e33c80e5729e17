// tokenizer.json is hostile: whatever contradicts itself, or asks for what is not supported, is one DataError that says
// where and what.
#include "parlat/io/tokenizer_json.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "parlat/base/error.h"

namespace parlat {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

json byte_level() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}; }

json small_file() {
  return {{"version", "1.0"},
          {"added_tokens", json::array({{{"id", 5}, {"content", "<s>"}, {"special", true}}})},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level()},
          {"post_processor", nullptr},
          {"decoder", byte_level()},
          {"model",
           {{"type", "BPE"},
            {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}, {"abb", 3}, {"c", 4}}},
            {"merges", json::array({"a b", json::array({"ab", "b"})})}}}};
}

std::string error_of(const json& file) {
  try {
    parse_tokenizer_json(file, "tokenizer.json");
  } catch (const DataError& error) {
    return error.what();
  }
  return "no error";
}

// The error after one place of the file is replaced.
std::string error_with(const std::string& pointer, const json& value) {
  json file = small_file();
  file[json::json_pointer(pointer)] = value;
  return error_of(file);
}

TEST(TokenizerJson, ReadsTokensAndMerges) {
  const TokenizerSpec spec = parse_tokenizer_json(small_file(), "tokenizer.json");
  ASSERT_EQ(spec.tokens.size(), 6);
  EXPECT_EQ(spec.tokens[3].text, "abb");
  EXPECT_TRUE(spec.tokens[5].added);
  ASSERT_EQ(spec.merges.size(), 2);
  EXPECT_EQ(spec.merges[1].left, 2);
  EXPECT_EQ(spec.merges[1].right, 1);
  EXPECT_EQ(spec.merges[1].result, 3);
  EXPECT_FALSE(spec.nfc);
}

TEST(TokenizerJson, RefusesBrokenVocabularies) {
  EXPECT_EQ(error_with("/model/vocab", nullptr), "tokenizer.json: model.vocab: expected an object, got null");
  EXPECT_THAT(error_with("/model/vocab", json::array({1, 2})), HasSubstr("expected an object, got an array"));
  EXPECT_EQ(error_with("/model/vocab/b", -1),
            "tokenizer.json: model.vocab: \"b\": expected an integer from 0 to 4194303, got -1");
  EXPECT_THAT(error_with("/model/vocab/b", 1e30), HasSubstr("got 1e+30"));
  EXPECT_THAT(error_with("/model/vocab/b", uint64_t{1} << 40), HasSubstr("expected an integer from 0 to 4194303"));
  EXPECT_EQ(error_with("/model/vocab/b", 4), "tokenizer.json: expected one token with id 4, got \"b\" and \"c\"");
  EXPECT_THAT(error_with("/model", nullptr), HasSubstr("model: expected an object, got null"));
  json empty = small_file();
  empty["model"]["vocab"] = json::object();
  empty["model"]["merges"] = json::array();
  empty["added_tokens"] = json::array();
  EXPECT_EQ(error_of(empty), "tokenizer.json: expected a vocabulary, got no token");
}

TEST(TokenizerJson, RefusesBrokenMerges) {
  EXPECT_EQ(error_with("/model/merges", nullptr), "tokenizer.json: model.merges: expected an array, got null");
  EXPECT_EQ(error_with("/model/merges/0", "a x"),
            "tokenizer.json: model.merges[0]: expected tokens of the vocabulary, got \"x\"");
  EXPECT_EQ(error_with("/model/merges/1", "b a"),
            "tokenizer.json: model.merges[1]: expected tokens of the vocabulary, got \"ba\"");
  for (const json& merge : {json("ab"), json("a b b"), json(3), json::array({"a"}), json::array({"a", 1})}) {
    EXPECT_THAT(error_with("/model/merges/1", merge), HasSubstr("merges[1]: expected \"left right\" or"));
  }
}

TEST(TokenizerJson, RefusesOtherModels) {
  EXPECT_EQ(error_with("/model/type", "Unigram"), "tokenizer.json: model.type: expected BPE, got \"Unigram\"");
  EXPECT_THAT(error_with("/model/dropout", 0.1), HasSubstr("model.dropout: expected no dropout, got 0.1"));
  EXPECT_THAT(error_with("/model/end_of_word_suffix", "</w>"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(error_with("/model/continuing_subword_prefix", "##"), HasSubstr("continuing_subword_prefix"));
  EXPECT_EQ(error_with("/model/end_of_word_suffix", ""), "no error");
  EXPECT_THAT(error_with("/version", "2.0"), HasSubstr("version: expected 1.0, got \"2.0\""));
  EXPECT_THAT(error_with("/decoder/type", "Metaspace"), HasSubstr("decoder.type: expected ByteLevel"));
}

TEST(TokenizerJson, RefusesContradictingAddedTokens) {
  EXPECT_THAT(error_with("/added_tokens/0/id", 4), HasSubstr("expected one token with id 4, got"));
  EXPECT_EQ(error_with("/added_tokens/0/content", "ab"),
            "tokenizer.json: added_tokens[0]: expected \"ab\" to be 2 as in the vocabulary, got 5");
  EXPECT_THAT(error_with("/added_tokens/0/id", "5"), HasSubstr("added_tokens[0].id: expected an integer"));
  EXPECT_THAT(error_with("/added_tokens/0/lstrip", 1), HasSubstr("lstrip: expected true or false, got 1"));
  json twice = small_file();
  twice["added_tokens"].push_back({{"id", 6}, {"content", "<s>"}});
  EXPECT_EQ(error_of(twice), "tokenizer.json: added_tokens[1]: \"<s>\" appears twice");
}

TEST(TokenizerJson, KnowsNormalizers) {
  const auto nfc = [](const json& normalizer) {
    json file = small_file();
    file["normalizer"] = normalizer;
    return parse_tokenizer_json(file, "tokenizer.json").nfc;
  };
  EXPECT_TRUE(nfc({{"type", "NFC"}}));
  EXPECT_FALSE(nfc({{"type", "Sequence"}, {"normalizers", json::array()}}));
  EXPECT_TRUE(nfc({{"type", "Sequence"}, {"normalizers", json::array({{{"type", "NFC"}}})}}));
  EXPECT_EQ(error_with("/normalizer", {{"type", "Lowercase"}}),
            "tokenizer.json: normalizer.type: expected NFC or none, got \"Lowercase\"");
}

TEST(TokenizerJson, KnowsPreTokenizers) {
  const auto with = [](const json& value) { return error_with("/pre_tokenizer", value); };
  const auto sequence = [](const json& parts) { return json{{"type", "Sequence"}, {"pretokenizers", parts}}; };
  EXPECT_THAT(with(nullptr), HasSubstr("pre_tokenizer: expected a pre-tokenizer"));
  EXPECT_THAT(with({{"type", "Metaspace"}}), HasSubstr("pre_tokenizer.type: expected Split, Digits"));
  EXPECT_THAT(with(sequence(json::array())), HasSubstr("expected one that ends in ByteLevel"));
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  EXPECT_EQ(with(sequence({digits, byte_level()})), "no error");
  EXPECT_THAT(with(sequence({byte_level(), digits})),
              HasSubstr("pre_tokenizer.pretokenizers[1]: \"Digits\" behind ByteLevel is not supported"));
  json split = {{"type", "Split"}, {"pattern", {{"Regex", "a+"}}}, {"behavior", "Isolated"}, {"invert", false}};
  EXPECT_EQ(with(sequence({split, byte_level()})), "no error");
  split["behavior"] = "Sideways";
  EXPECT_THAT(with(sequence({split, byte_level()})), HasSubstr("behavior: expected Isolated, Removed"));
  split["behavior"] = "Removed";
  split["pattern"] = {{"Regex", "(a"}};
  EXPECT_THAT(with(sequence({split, byte_level()})),
              HasSubstr("pretokenizers[0].pattern: a group that does not end in the pattern \"(a\""));
  split["pattern"] = {{"String", ""}};
  EXPECT_EQ(with(sequence({split, byte_level()})), "no error");
  split["pattern"] = json::object();
  EXPECT_THAT(with(sequence({split, byte_level()})), HasSubstr("pattern.Regex: expected a string, got null"));
  json nested = byte_level();
  for (int i = 0; i < 20; ++i) nested = sequence(json::array({nested}));
  EXPECT_THAT(with(nested), HasSubstr("expected at most 64 splits in sequences 8 deep, got more"));
}

TEST(TokenizerJson, TakesThePrefixOfPostProcessors) {
  const auto prefix = [](const json& post) {
    json file = small_file();
    file["post_processor"] = post;
    return parse_tokenizer_json(file, "tokenizer.json").prefix;
  };
  const json special = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json tokens = {{"<s>", {{"id", "<s>"}, {"ids", {5}}, {"tokens", {"<s>"}}}}};
  const json front = {{"type", "TemplateProcessing"}, {"single", {special, text, special}}, {"special_tokens", tokens}};
  const json back = {{"type", "TemplateProcessing"}, {"single", {text, special}}, {"special_tokens", tokens}};
  EXPECT_THAT(prefix(front), ElementsAre(5));
  EXPECT_THAT(prefix(back), ElementsAre());
  EXPECT_THAT(prefix({{"type", "Sequence"}, {"processors", {byte_level(), front}}}), ElementsAre(5));
  EXPECT_THAT(prefix({{"type", "BertProcessing"}, {"cls", {"<s>", 5}}, {"sep", {"c", 4}}}), ElementsAre(5));
  EXPECT_THAT(error_with("/post_processor", {{"type", "Other"}}), HasSubstr("post_processor.type: expected ByteLevel"));
  EXPECT_THAT(error_with("/post_processor", {{"type", "TemplateProcessing"},
                                             {"single", json::array({special})},
                                             {"special_tokens", json::object()}}),
              HasSubstr("post_processor.special_tokens.<s>: expected an object, got null"));
}

TEST(TokenizerJson, ErrorsAreOneLineWhateverTheFileHolds) {
  json deep = 1;
  for (int i = 0; i < 60; ++i) deep = json::array({deep});
  for (const json& value : {json("line\nbreak\x1b"), json(std::string(1000, 'x')), deep}) {
    for (const char* place :
         {"/model/vocab/b", "/model/merges/0", "/added_tokens/0/id", "/pre_tokenizer", "/normalizer", "/post_processor",
          "/decoder", "/version", "/model/type", "/model/dropout"}) {
      const std::string error = error_with(place, value);
      EXPECT_THAT(error, AllOf(StartsWith("tokenizer.json: "), Not(HasSubstr("\n")), Not(HasSubstr("\x1b"))));
      EXPECT_LT(error.size(), 400);
    }
  }
  const json special = {{"SpecialToken", {{"id", "a\nb"}}}};
  const json post = {
      {"type", "TemplateProcessing"}, {"single", json::array({special})}, {"special_tokens", json::object()}};
  EXPECT_THAT(error_with("/post_processor", post), HasSubstr("special_tokens.a\\x0ab: expected an object"));
}

}  // namespace
}  // namespace parlat
