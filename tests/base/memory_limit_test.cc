#include "parlat/base/memory_limit.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "tests/temporary_folder.h"

namespace parlat {
namespace {

constexpr int64_t kMachine = int64_t{64} << 30;

class MemoryLimit : public testing::Test {
 protected:
  void write(const std::filesystem::path& file, const std::string& text) {
    std::filesystem::create_directories((folder_.path() / file).parent_path());
    std::ofstream(folder_.path() / file) << text;
  }
  int64_t limit() { return control_group_limit(folder_.path() / "cgroup", folder_.path() / "sys", kMachine); }
  TemporaryFolder folder_;
};

TEST_F(MemoryLimit, NoneWithoutControlGroups) { EXPECT_EQ(limit(), kMachine); }

TEST_F(MemoryLimit, LeastOfTheGroupAndWhatItLiesIn) {
  write("cgroup", "0::/job/step\n");
  write("sys/memory.max", "max\n");
  write("sys/job/memory.max", "8000000\n");
  write("sys/job/step/memory.max", "9000000\n");
  EXPECT_EQ(limit(), 8000000);
}

TEST_F(MemoryLimit, RootOfAContainerCountsWhereItsPathIsTheHosts) {
  write("cgroup", "0::/host/path/of/it\n");
  write("sys/memory.max", "7000000\n");
  EXPECT_EQ(limit(), 7000000);
}

TEST_F(MemoryLimit, VersionOne) {
  write("cgroup", "9:name=systemd:/\n4:cpu,memory:/a\n3:cpuset:/a\n0::/\n");
  write("sys/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/memory/a/memory.limit_in_bytes", "6000000\n");
  write("sys/cpuset/a/memory.limit_in_bytes", "1\n");
  EXPECT_EQ(limit(), 6000000);
}

TEST(MemoryLimitHere, IsPositive) { EXPECT_GT(memory_limit(), 1 << 20); }

}  // namespace
}  // namespace parlat
