// The format as the reference package writes and reads it, and files that lie.
#include "parlat/io/safetensors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cstring>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/tensor/fill.h"
#include "tests/full_disk.h"
#include "tests/python_script.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

NamedTensors one_of_each() {
  const Tensor values = seeded_normal({3, 5}, 10, 1, "values");
  NamedTensors tensors;
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                                     at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn}) {
    tensors.emplace_back(c10::toString(dtype), values.abs().to(dtype));
  }
  tensors.emplace_back("scalar", at::scalar_tensor(2.5, at::kFloat));
  tensors.emplace_back("empty", at::empty({0, 7}, at::kFloat));
  tensors.emplace_back("transposed", values.t());
  return tensors;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0);
}

TEST(Safetensors, RoundTripsEveryDtypeAndShape) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a.safetensors", one_of_each(), {{"format", "pt"}, {"note", "caf\xC3\xA9"}});
  const SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.entries().size(), one_of_each().size());
  EXPECT_EQ(file.metadata().at("note"), "caf\xC3\xA9");
  for (const auto& [name, tensor] : one_of_each()) EXPECT_TRUE(same_bits(file.tensor(name), tensor)) << name;
}

TEST(Safetensors, ViewsOutliveTheFile) {
  const TemporaryFolder folder;
  const Tensor want = seeded_normal({1000}, 1, 1, "x");
  write_safetensors(folder / "a", {{"x", want}});
  Tensor view;
  {
    const SafetensorsFile file(folder / "a");
    view = file.tensor("x");
  }
  std::filesystem::remove(folder / "a");
  EXPECT_TRUE(view.equal(want));
}

TEST(Safetensors, NoTensors) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", {});
  EXPECT_TRUE(SafetensorsFile(folder / "a").entries().empty());
}

// The reference package reads what we write, and writes the same bytes from the same tensors.
TEST(Safetensors, AgreesWithTheReferencePackage) {
  const TemporaryFolder folder;
  NamedTensors tensors = one_of_each();
  tensors.pop_back();  // it refuses to write tensors that are not contiguous
  write_safetensors(folder / "ours", tensors, {{"format", "pt"}});
  folder.write("rewrite.py", R"(import sys
from safetensors.torch import load_file, save_file
save_file(load_file(sys.argv[1]), sys.argv[2], metadata={"format": "pt"})
)");
  ASSERT_EQ(run_python(folder / "rewrite.py", {(folder / "ours").string(), (folder / "theirs").string()}), "");
  EXPECT_TRUE(read_file(folder / "ours") == read_file(folder / "theirs"));
  const SafetensorsFile theirs(folder / "theirs");
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same_bits(theirs.tensor(name), tensor)) << name;
}

TEST(Safetensors, AFullDiskLeavesTheOldFile) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", {{"x", at::ones({3})}});
  {
    const FullDisk full(5000);
    EXPECT_THROW(write_safetensors(folder / "a", {{"x", at::zeros({5000})}}), DataError);
  }
  EXPECT_TRUE(SafetensorsFile(folder / "a").tensor("x").equal(at::ones({3})));
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) EXPECT_EQ(file.path(), folder / "a");
}

std::string file_bytes(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

std::string opening(const std::string& bytes) {
  const TemporaryFolder folder;
  try {
    const SafetensorsFile file(folder.write("a.safetensors", bytes));
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a.safetensors: "));
    return error.what();
  }
  return "accepted";
}

TEST(Safetensors, OddHeaderLengthsAreReadThroughACopy) {
  const TemporaryFolder folder;
  const std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} )";
  ASSERT_NE((sizeof(uint64_t) + header.size()) % sizeof(float), 0u);
  const float values[] = {1.5F, -2.0F};
  const std::string data(reinterpret_cast<const char*>(values), sizeof(values));
  const SafetensorsFile file(folder.write("a", file_bytes(header, data)));
  EXPECT_TRUE(file.tensor("x").equal(at::tensor({1.5F, -2.0F})));
  EXPECT_THROW(file.tensor("y"), DataError);
}

struct Lie {
  const char* header;
  size_t data_bytes;
  const char* expected;
};
class Lies : public ::testing::TestWithParam<Lie> {};

TEST_P(Lies, AreRefused) {
  EXPECT_THAT(opening(file_bytes(GetParam().header, std::string(GetParam().data_bytes, 'x'))),
              HasSubstr(GetParam().expected));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Lies,
    ::testing::Values(
        Lie{R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7, "expected 8 bytes of data, got 7"},
        Lie{R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 9, "bytes nobody owns"},
        Lie{R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8,
            "expected 12 bytes for F32 of shape [3], got 8"},
        Lie{R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "expected data_offsets [begin, end]"},
        Lie{R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "expected data_offsets [begin, end]"},
        Lie{R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "unexpected -2"},
        Lie{R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "unexpected 2.0"},
        Lie{R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "beyond 64 bits"},
        Lie{R"({"x":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0, "beyond 64 bits"},
        Lie{R"({"x":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0, "beyond 64 bits"},
        Lie{R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
            3, "y: expected its data to begin at 2, where the data before it end, got 1 (an overlap)"},
        Lie{R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("y":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
            2, "an overlap"},
        Lie{R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("y":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
            5, "a hole"},
        Lie{R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3, "a hole"}));

INSTANTIATE_TEST_SUITE_P(
    Json, Lies,
    ::testing::Values(
        Lie{" ", 0, "header is not JSON"}, Lie{"{", 0, "header is not JSON"}, Lie{"{}x", 0, "header is not JSON"},
        Lie{"[]", 0, "expected the header to be a JSON object"}, Lie{"7", 0, "expected the header to be a JSON object"},
        Lie{R"({"x":1})", 0, "x: unexpected a number"}, Lie{R"({"x":[]})", 0, "x: unexpected an array"},
        Lie{R"({"x":null})", 0, "x: unexpected null"},
        Lie{R"({"x":{"dtype":"F32","shape":[],"data_offsets":[0,4],"extra":1}})", 4, "x: unknown key 'extra'"},
        Lie{R"({"x":{"dtype":"F31","shape":[],"data_offsets":[0,4]}})", 4, R"(x: unknown dtype "F31")"},
        Lie{R"({"x":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}})", 4, "x.dtype: unexpected an array"},
        Lie{R"({"x":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "x.shape: unexpected an array"},
        Lie{R"({"x":{"dtype":"F32","shape":{},"data_offsets":[0,4]}})", 4, "x.shape: unexpected an object"},
        Lie{R"({"x":{"dtype":"F32","shape":"","data_offsets":[0,4]}})", 4, "x.shape: unexpected a string"},
        Lie{R"({"x":{"dtype":"F32","shape":[]}})", 0, "x: data_offsets is missing"},
        Lie{R"({"x":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "x: dtype appears twice"},
        Lie{R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
            R"("x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
            0, "x appears twice"},
        Lie{R"({"__metadata__":{"a":1}})", 0, "__metadata__.a: unexpected a number"},
        Lie{R"({"__metadata__":{"a":"b","a":"c"}})", 0, "a appears twice"},
        Lie{R"({"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1, "too long"},
        Lie{R"({"a\nb":{}})", 0, "control character"}));

TEST(Safetensors, ShortAndForeignFilesAreRefused) {
  EXPECT_THAT(opening(""), HasSubstr("got 0 bytes"));
  EXPECT_THAT(opening("1234567"), HasSubstr("got 7 bytes"));
  EXPECT_THAT(opening(std::string(1000, '\xFF')), HasSubstr("expected a header of at most 992 bytes"));
  EXPECT_THAT(opening(file_bytes("{}", "").substr(0, 9)), HasSubstr("expected a header of at most 1 bytes, got 2"));
  const TemporaryFolder folder;
  EXPECT_THROW(SafetensorsFile(folder / "none"), DataError);
  EXPECT_THROW(SafetensorsFile{folder.path()}, DataError);
}

// Nested arrays would exhaust memory or stack if a document were built before it is checked.
TEST(Safetensors, DeepNestingIsRefusedAtOnce) {
  EXPECT_THAT(opening(file_bytes(std::string(5'000'000, '['), "")),
              HasSubstr("expected the header to be a JSON object"));
}

// The last kilobyte missing is no row of zeros.
TEST(Safetensors, ATruncatedFileIsRefused) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", {{"x", at::ones({1000})}});
  const std::string bytes = read_file(folder / "a");
  EXPECT_THAT(opening(bytes.substr(0, bytes.size() - 1024)), HasSubstr("cut short"));
}

}  // namespace
}  // namespace parlat
