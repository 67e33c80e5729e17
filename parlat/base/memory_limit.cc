#include "parlat/base/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "parlat/base/error.h"
#include "parlat/base/units.h"

namespace parlat {

namespace {

// A position, and ranges which a ring cuts anew.
constexpr double kBytesAToken = 48;

// "max", or a file that is absent, limits nothing.
int64_t least(const std::filesystem::path& file, int64_t limit) {
  std::ifstream stream(file);
  int64_t bytes = 0;
  return stream >> bytes && bytes > 0 ? std::min(bytes, limit) : limit;
}

}  // namespace

int64_t control_group_limit(const std::filesystem::path& membership, const std::filesystem::path& hierarchy,
                            int64_t otherwise) {
  int64_t limit = otherwise;
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or of version 1 "4:memory:/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::filesystem::path root = v2 ? hierarchy : hierarchy / "memory";
    const char* const file = v2 ? "memory.max" : "memory.limit_in_bytes";
    // Within a container the path may be the host's, and only its root be visible.
    limit = least(root / file, limit);
    std::filesystem::path at = root;
    for (const std::filesystem::path& part : std::filesystem::path(line.substr(second + 1)).relative_path()) {
      at /= part;
      limit = least(at / file, limit);
    }
  }
  return limit;
}

int64_t memory_limit() {
  const int64_t machine = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  return control_group_limit("/proc/self/cgroup", "/sys/fs/cgroup", machine);
}

void require_memory_for_tokens(double tokens, int ranks) {
  const auto memory = static_cast<double>(memory_limit());
  if (tokens * kBytesAToken * ranks <= memory) return;
  throw ConfigError("sequence: expected the positions of all tokens to fit in {}, got {} for {} ranks",
                    format_bytes(memory), format_bytes(tokens * kBytesAToken * ranks), ranks);
}

}  // namespace parlat
