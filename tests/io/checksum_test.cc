#include "parlat/io/checksum.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

std::string error_of(const std::filesystem::path& path) {
  try {
    checksum(path);
  } catch (const DataError& error) {
    return error.what();
  }
  return "no error";
}

// XXH3's own: of nothing, and of what xxhsum -H3 prints for these bytes.
TEST(ChecksumTest, IsThePublishedHash) {
  const TemporaryFolder folder;
  EXPECT_EQ(checksum(folder.write("empty", "")), (nlohmann::json{{"bytes", 0}, {"xxh3", "2d06800538d394c2"}}));
  EXPECT_EQ(checksum(folder.write("abc", "abc")), (nlohmann::json{{"bytes", 3}, {"xxh3", "78af5f94892f3950"}}));
}

TEST(ChecksumTest, OfTensorsIsThatOfTheirBytesInTheOrderOfTheirNames) {
  const auto bytes = [](std::vector<int64_t> values) { return at::tensor(values, at::kByte); };
  EXPECT_EQ(checksum({{"b", bytes({'b', 'c'})}, {"a", bytes({'a'})}, {"empty", bytes({})}}), "78af5f94892f3950");
}

// Blocks are an implementation's matter: a change of any byte shows, behind the first block too.
TEST(ChecksumTest, SeesEveryByte) {
  const TemporaryFolder folder;
  std::string bytes((size_t{1} << 20) + 5, 'x');
  const nlohmann::json whole = checksum(folder.write("whole", bytes));
  EXPECT_EQ(whole["bytes"], bytes.size());
  for (const size_t at : {size_t{0}, size_t{1} << 20, bytes.size() - 1}) {
    std::string changed = bytes;
    changed[at] ^= 1;
    EXPECT_NE(checksum(folder.write("changed", changed)), whole) << at;
  }
}

TEST(ChecksumTest, SaysWhyAFileCannotBeRead) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(folder / "none"), ::testing::HasSubstr("none: cannot be opened: No such file"));
  EXPECT_THAT(error_of(folder.path()), ::testing::HasSubstr("expected a regular file"));
  EXPECT_THAT(error_of("/dev/zero"), ::testing::HasSubstr("/dev/zero: expected a regular file"));
}

}  // namespace
}  // namespace parlat
