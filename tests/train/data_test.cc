// What is trained on depends on text, seed and settings only: not on ranks, and not on where a run was resumed.
#include "parlat/train/data.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/model/transformer.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Document d's tokens are 100 d, 100 d + 1, ...
std::vector<int64_t> coded_document(int64_t document, int64_t length) {
  std::vector<int64_t> tokens(length);
  std::iota(tokens.begin(), tokens.end(), 100 * document);
  return tokens;
}

PackedText coded_text(const std::vector<int64_t>& lengths, int64_t sequence) {
  std::vector<std::vector<int64_t>> documents;
  for (size_t d = 0; d < lengths.size(); ++d) documents.push_back(coded_document(static_cast<int64_t>(d), lengths[d]));
  return PackedText(documents, sequence);
}

std::vector<int64_t> values(const Tensor& tensor) {
  const Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(PackedTextTest, PacksDocumentsAndCutsLongOnes) {
  const PackedText text = coded_text({3, 2, 8, 4}, 6);
  ASSERT_EQ(text.count(), 2);  // 17 tokens: the last 5 fill no sequence
  const Batch batch = text.batch({0, 1});
  EXPECT_THAT(values(batch.tokens_BS[0]), ElementsAre(0, 1, 2, 100, 101, 200));
  EXPECT_THAT(values(batch.targets_BS[0]), ElementsAre(1, 2, kIgnoredTarget, 101, kIgnoredTarget, 201));
  EXPECT_THAT(values(batch.documents.positions()[0]), ElementsAre(0, 1, 2, 0, 1, 0));
  EXPECT_THAT(values(batch.tokens_BS[1]), ElementsAre(201, 202, 203, 204, 205, 206));
  EXPECT_THAT(values(batch.targets_BS[1]), ElementsAre(202, 203, 204, 205, 206, 207));
  EXPECT_THAT(values(batch.documents.positions()[1]), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(text.document_lengths(0), ElementsAre(3, 2, 1));
  EXPECT_THAT(text.document_lengths(1), ElementsAre(6));
  EXPECT_EQ(text.target_count(0), 4);
  EXPECT_EQ(text.target_count(1), 6);
}

TEST(PackedTextTest, LastTokenOfTheTextHasNoTarget) {
  const PackedText text = coded_text({4, 2}, 3);
  ASSERT_EQ(text.count(), 2);
  EXPECT_THAT(values(text.batch({1}).targets_BS), ElementsAre(kIgnoredTarget, 101, kIgnoredTarget));
  EXPECT_EQ(text.target_count(1), 1);
}

TEST(PackedTextTest, CountsTheTargetsThatItsBatchesHave) {
  const PackedText text = coded_text({1, 9, 2, 2, 1, 14, 5}, 4);
  for (int64_t i = 0; i < text.count(); ++i) {
    EXPECT_EQ(text.batch({i}).targets_BS.ne(kIgnoredTarget).sum().item<int64_t>(), text.target_count(i)) << i;
  }
}

TEST(PackedTextTest, SubsetsNumberTheirSequencesFromZero) {
  const PackedText text = coded_text({7, 11, 9}, 4);
  const PackedText tail = text.subset({2, 5});
  EXPECT_EQ(tail.count(), 3);
  for (int64_t i = 0; i < tail.count(); ++i) {
    EXPECT_TRUE(tail.batch({i}).tokens_BS.equal(text.batch({i + 2}).tokens_BS));
    EXPECT_TRUE(tail.batch({i}).targets_BS.equal(text.batch({i + 2}).targets_BS));
  }
}

TEST(PackedTextTest, FingerprintSeesTokensAndBorders) {
  const PackedText text({{1, 2, 3, 4}, {5, 6, 7, 8}}, 4);
  EXPECT_EQ(text.fingerprint(), PackedText({{1, 2, 3, 4}, {5, 6, 7, 8}}, 4).fingerprint());
  EXPECT_NE(text.fingerprint(), PackedText({{1, 2, 3, 4}, {5, 6, 7, 9}}, 4).fingerprint());
  EXPECT_NE(text.fingerprint(), PackedText({{1, 2, 3, 4, 5}, {6, 7, 8}}, 4).fingerprint());
}

TEST(SequenceOrderTest, VisitsEverySequenceOnceAnEpochInAnOrderOfItsOwn) {
  SequenceOrder order(50, 7);
  const std::vector<int64_t> first = order.sequences({0, 50}), second = order.sequences({50, 100});
  std::vector<int64_t> sorted = first;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> all(50);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(sorted, all);
  EXPECT_NE(first, all);
  EXPECT_NE(first, second);
  EXPECT_NE(first, SequenceOrder(50, 8).sequences({0, 50}));
}

TEST(SequenceOrderTest, NeedsNoHistory) {
  SequenceOrder walked(9, 3);
  const std::vector<int64_t> all = walked.sequences({0, 40});
  EXPECT_EQ(SequenceOrder(9, 3).sequences({25, 40}), std::vector<int64_t>(all.begin() + 25, all.end()));
  // What two data ranks take of a batch is the batch.
  std::vector<int64_t> parts = SequenceOrder(9, 3).sequences({24, 27});
  for (const int64_t sequence : SequenceOrder(9, 3).sequences({27, 30})) parts.push_back(sequence);
  EXPECT_EQ(parts, std::vector<int64_t>(all.begin() + 24, all.begin() + 30));
}

class TrainingTextTest : public ::testing::Test {
 protected:
  TextSpec spec(const std::string& bytes) {
    return {
        .files = {folder_.write("text.txt", bytes)}, .evaluation_file = {}, .evaluation_fraction = 0, .sequence = 10};
  }
  TemporaryFolder folder_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_byte_tokenizer();
};

TEST_F(TrainingTextTest, EndsEveryFileWithEndOfDocument) {
  TextSpec two = spec("abc");
  two.files.push_back(folder_.write("second.txt", "defghij"));
  two.sequence = 12;
  const TrainingText text = load_training_text(two, *tokenizer_);
  EXPECT_THAT(values(text.training.batch({0}).tokens_BS),
              ElementsAre('a', 'b', 'c', 256, 'd', 'e', 'f', 'g', 'h', 'i', 'j', 256));
  EXPECT_EQ(text.evaluation, std::nullopt);
}

TEST_F(TrainingTextTest, HoldsOutTheLastSequences) {
  TextSpec held = spec(std::string(99, 'x'));
  held.evaluation_fraction = 0.2;
  const TrainingText text = load_training_text(held, *tokenizer_);
  EXPECT_EQ(text.training.count(), 8);
  ASSERT_TRUE(text.evaluation.has_value());
  EXPECT_EQ(text.evaluation->count(), 2);
  EXPECT_EQ(values(text.evaluation->batch({1}).tokens_BS).back(), 256);
}

TEST_F(TrainingTextTest, NamesBothCountsOfATextThatIsTooShort) {
  const auto message = [&](const TextSpec& text) -> std::string {
    try {
      load_training_text(text, *tokenizer_);
    } catch (const DataError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message(spec("short")),
              HasSubstr("text.txt: expected at least 10 tokens for a sequence of 10 tokens, got 6"));
  TextSpec held = spec("just one sequence");
  held.evaluation_fraction = 0.5;
  EXPECT_THAT(message(held), HasSubstr("expected at least 20 tokens"));
}

TEST_F(TrainingTextTest, RefusesImpossibleSettings) {
  EXPECT_THROW(load_training_text({}, *tokenizer_), ConfigError);
  TextSpec fraction = spec("some text");
  fraction.evaluation_fraction = 1;
  EXPECT_THROW(load_training_text(fraction, *tokenizer_), ConfigError);
  TextSpec sequence = spec("some text");
  sequence.sequence = 0;
  EXPECT_THROW(load_training_text(sequence, *tokenizer_), ConfigError);
}

}  // namespace
}  // namespace parlat
