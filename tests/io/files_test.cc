// Files that appear whole or not at all, text, JSON lines and tokens.
#include "parlat/io/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "parlat/base/error.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/tokenizer.h"
#include "parlat/io/utf8.h"
#include "tests/full_disk.h"
#include "tests/temporary_folder.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename Body>
std::string data_error(Body body) {
  try {
    body();
  } catch (const DataError& error) {
    return error.what();
  }
  return "nothing thrown";
}

size_t entries(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST(Files, WrittenBytesAreReadBack) {
  const TemporaryFolder folder;
  std::string bytes(3'000'000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 256);
  write_file_atomically(folder / "a", bytes);
  EXPECT_TRUE(read_file(folder / "a") == bytes);
  write_file_atomically(folder / "a", "");
  EXPECT_EQ(read_file(folder / "a"), "");
  EXPECT_EQ(entries(folder.path()), 1u);
}

TEST(Files, MissingFilesAreNamedWithTheReason) {
  const TemporaryFolder folder;
  EXPECT_THAT(data_error([&] { read_file(folder / "none"); }), AllOf(HasSubstr("none"), HasSubstr("No such file")));
  EXPECT_THAT(data_error([&] { read_file(folder.path()); }), HasSubstr("Is a directory"));
  EXPECT_THAT(data_error([&] { write_file_atomically(folder / "no" / "a", "x"); }), HasSubstr("No such file"));
}

TEST(Files, AFullDiskLeavesTheOldFile) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "a", "old");
  {
    const FullDisk full(1000);
    const std::string message = data_error([&] { write_file_atomically(folder / "a", std::string(5000, 'x')); });
    EXPECT_THAT(message, AllOf(HasSubstr((folder / "a").string()), HasSubstr("File too large")));
  }
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(entries(folder.path()), 1u) << "the temporary file stayed";
}

// What a real full disk answers.
TEST(Files, ReasonsOfTheSystemAreReported) {
  const int full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  EXPECT_FALSE(write_fully(full, "x"));
  EXPECT_EQ(errno, ENOSPC);
  ::close(full);
}

TEST(Files, NothingAppearsWithoutCommit) {
  const TemporaryFolder folder;
  { AtomicFile(folder / "a").write("half"); }
  EXPECT_EQ(entries(folder.path()), 0u);
}

TEST(Files, ALinkIsFollowedNotReplaced) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "far");
  write_file_atomically(folder / "far" / "a", "old");
  std::filesystem::create_symlink("far/a", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "far" / "a"), "new");
}

TEST(Files, AnotherNameOfAFileIsThatFile) {
  const TemporaryFolder folder;
  const std::filesystem::path old = folder.write("old", "bytes"), link = folder / "link";
  std::filesystem::create_symlink("old", link);
  for (int time = 0; time < 2; ++time) {  // the second time the name is that file's already
    AtomicFile file(folder / "new");
    EXPECT_TRUE(file.link(link));
    EXPECT_EQ(std::filesystem::exists(folder / "new"), time == 1) << "before commit";
    file.commit();
    EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(folder / "new")));
    EXPECT_TRUE(std::filesystem::equivalent(folder / "new", old));
  }
  AtomicFile file(folder / "third");
  EXPECT_FALSE(file.link(folder / "nowhere"));
  file.write("its own");
  file.commit();
  EXPECT_EQ(read_file(folder / "third"), "its own");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
  }
}

TEST(Files, DevicesAndPipesAreWrittenToNotReplaced) {
  const TemporaryFolder folder;
  write_file_atomically("/dev/null", "x");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_THAT(data_error([] { write_file_atomically("/dev/full", "x"); }), HasSubstr("/dev/full: cannot be written"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const int reader = ::open((folder / "pipe").c_str(), O_RDONLY | O_NONBLOCK);
  write_file_atomically(folder / "pipe", "x");
  char byte = 0;
  EXPECT_EQ(::read(reader, &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
  ::close(reader);
  EXPECT_EQ(entries(folder.path()), 1u);
}

// A file that stdout goes to keeps what was printed before.
TEST(Files, WhatStdoutGoesToIsContinued) {
  const TemporaryFolder folder;
  EXPECT_EXIT(
      {
        const int file = ::open((folder / "out").c_str(), O_WRONLY | O_CREAT, 0600);
        ::dup2(file, STDOUT_FILENO);
        if (!write_fully(STDOUT_FILENO, "table\n")) ::_exit(1);
        write_file_atomically("/dev/stdout", "record\n");
        ::_exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(read_file(folder / "out"), "table\nrecord\n");
}

TEST(Files, AnotherWritersTemporaryFileIsLeftAlone) {
  const TemporaryFolder folder;
  AtomicFile slow(folder / "a");
  slow.write("slow");
  write_file_atomically(folder / "a", "quick");
  EXPECT_EQ(read_file(folder / "a"), "quick");
  slow.commit();
  EXPECT_EQ(read_file(folder / "a"), "slow");
}

TEST(Files, FoldersThatCannotBeAreNamed) {
  const TemporaryFolder folder;
  create_folders(folder / "a" / "b");
  create_folders(folder / "a" / "b");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a" / "b"));
  folder.write("file", "");
  EXPECT_THAT(data_error([&] { create_folders(folder / "file" / "b"); }), HasSubstr("/file/b: cannot be created"));
  EXPECT_THAT(data_error([&] { create_folders(folder / "file"); }), HasSubstr("/file: cannot be created"));
}

TEST(Json, BrokenFilesAreNamedWithThePosition) {
  const TemporaryFolder folder;
  EXPECT_EQ(read_json(folder.write("a", R"({"x": 1})")).at("x"), 1);
  EXPECT_THAT(data_error([&] { read_json(folder.write("b", R"({"x": })")); }),
              AllOf(HasSubstr("/b: not JSON"), HasSubstr("column 7")));
}

// Copying or printing a value that is nested so deep would overflow the stack.
TEST(Json, DeepNestingIsRefused) {
  const TemporaryFolder folder;
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  read_json(folder.write("a", nested(64)));
  for (const int depth : {66, 1'000'000}) {
    EXPECT_THAT(data_error([&] { read_json(folder.write("b", nested(depth))); }),
                HasSubstr("/b: expected JSON nested at most 64 deep"));
  }
}

TEST(Utf8, AcceptsEveryLength) {
  EXPECT_EQ(find_invalid_utf8("plain ASCII, longer than one step of eight bytes"), std::nullopt);
  EXPECT_EQ(find_invalid_utf8("\xC2\x80 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF"), std::nullopt);
  EXPECT_EQ(find_invalid_utf8("\xF0\x90\x80\x80 \xF4\x8F\xBF\xBF"), std::nullopt);
  EXPECT_EQ(find_invalid_utf8(std::string_view("\0", 1)), std::nullopt);
  EXPECT_EQ(find_invalid_utf8(""), std::nullopt);
}

TEST(Utf8, FindsTheFirstBadByte) {
  const std::vector<std::string> bad = {"\x80",
                                        "\xBF",
                                        "\xC0\x80",
                                        "\xC1\xBF",
                                        "\xE0\x80\x80",
                                        "\xE0\x9F\xBF",
                                        "\xED\xA0\x80",
                                        "\xED\xBF\xBF",
                                        "\xF0\x80\x80\x80",
                                        "\xF0\x8F\xBF\xBF",
                                        "\xF4\x90\x80\x80",
                                        "\xF5\x80\x80\x80",
                                        "\xFF",
                                        "\xFE",
                                        "\xC3",
                                        "\xE2\x82",
                                        "\xF0\x9F\x98",
                                        "\xC3(",
                                        "\xE2\x28\xA1",
                                        "\xE2\x82\x28",
                                        "\xF0\x9F\x98\x28"};
  for (const std::string& sequence : bad) {
    for (const size_t before : {0, 1, 7, 8, 9, 16}) {
      const std::string text = std::string(before, 'a') + sequence + "tail";
      EXPECT_EQ(find_invalid_utf8(text), before) << ::testing::PrintToString(sequence);
      // Cut off at the end of the file as well.
      EXPECT_EQ(find_invalid_utf8(text.substr(0, before + sequence.size())), before);
    }
  }
}

TEST(Text, EmptyAndBinaryFilesAreRefused) {
  const TemporaryFolder folder;
  EXPECT_EQ(read_text(folder.write("a", "h\xC3\xA9llo")), "h\xC3\xA9llo");
  EXPECT_THAT(data_error([&] { read_text(folder.write("b", "")); }), HasSubstr("/b: expected text, got an empty file"));
  EXPECT_THAT(data_error([&] { read_text(folder.write("c", "latin-1: caf\xE9!")); }),
              HasSubstr("/c: expected UTF-8 text, got byte 0xe9 at offset 12"));
}

TEST(JsonLines, ResumingKeepsTheLinesAskedFor) {
  const TemporaryFolder folder;
  {
    JsonLines lines(folder / "m");
    for (int step = 1; step <= 4; ++step) lines.write({{"step", step}, {"loss", 0.1}});
  }
  const auto up_to_two = [](const nlohmann::json& line) { return line.at("step") <= 2; };
  {
    JsonLines lines(folder / "m", up_to_two);
    lines.write({{"step", 3}});
  }
  EXPECT_EQ(read_file(folder / "m"), "{\"loss\":0.1,\"step\":1}\n{\"loss\":0.1,\"step\":2}\n{\"step\":3}\n");
  { const JsonLines fresh(folder / "m"); }
  EXPECT_EQ(read_file(folder / "m"), "");
  { const JsonLines absent(folder / "n", up_to_two); }
  EXPECT_EQ(read_file(folder / "n"), "");
}

TEST(JsonLines, ALineCutShortByACrashIsDropped) {
  const TemporaryFolder folder;
  const auto all = [](const nlohmann::json&) { return true; };
  { const JsonLines lines(folder.write("m", "{\"step\":1}\n{\"ste"), all); }
  EXPECT_EQ(read_file(folder / "m"), "{\"step\":1}\n");
  EXPECT_THAT(data_error([&] { JsonLines(folder.write("m", "{\"step\":1}\nrubbish\n{}\n"), all); }),
              HasSubstr("/m: line 2: not JSON"));
  EXPECT_EQ(read_file(folder / "m"), "{\"step\":1}\nrubbish\n{}\n");
}

TEST(JsonLines, LinesThatAreNoObjectsAreRefused) {
  const TemporaryFolder folder;
  const auto all = [](const nlohmann::json&) { return true; };
  EXPECT_THAT(data_error([&] { JsonLines(folder.write("m", "{\"step\":1}\n[2]\n"), all); }),
              HasSubstr("/m: line 2: expected a JSON object, got array"));
}

TEST(JsonLines, AFullDiskIsReported) {
  const TemporaryFolder folder;
  JsonLines lines(folder / "m");
  const FullDisk full(100);
  EXPECT_THAT(data_error([&] {
                for (int i = 0; i < 20; ++i) lines.write({{"step", i}});
              }),
              HasSubstr("/m: cannot be written: File too large"));
}

TEST(ByteTokenizer, BytesAreTokens) {
  const auto tokenizer = make_byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  EXPECT_THAT(tokenizer->encode("a\xC3\xA9"), ElementsAre(97, 195, 169));
  EXPECT_THAT(tokenizer->encode(""), ElementsAre());
  std::string every;
  for (int byte = 0; byte < 256; ++byte) every += static_cast<char>(byte);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(every)), every);
  EXPECT_EQ(tokenizer->decode({104, 256, 105}), "hi");
  EXPECT_THROW(tokenizer->decode({257}), ConfigError);
  EXPECT_THROW(tokenizer->decode({-1}), ConfigError);
}

}  // namespace
}  // namespace parlat
