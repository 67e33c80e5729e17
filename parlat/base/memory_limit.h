#pragma once

#include <cstdint>
#include <filesystem>

namespace parlat {

// Bytes of memory that this process may use: the machine's, or less where a control group (a container, a batch job)
// limits it.
int64_t memory_limit();

// Throws ConfigError unless what `ranks` ranks of this process keep for every token, whatever the device, fits in it:
// positions and the range of keys that each token sees.
void require_memory_for_tokens(double tokens, int ranks);

// The least limit of the control groups named in `membership` (/proc/self/cgroup, versions 1 and 2), each with all that
// it lies in below `hierarchy` (/sys/fs/cgroup); `otherwise` where none limits.
int64_t control_group_limit(const std::filesystem::path& membership, const std::filesystem::path& hierarchy,
                            int64_t otherwise);

}  // namespace parlat
