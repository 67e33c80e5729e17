#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "parlat/base/error.h"

// What targets whose inputs are safetensors files share.

inline void require(bool holds) {
  if (!holds) std::abort();
}

// Calls body(path, size) with the input as a whole file, and as the header of one with `data` behind it, since few
// mutations keep the length at the front right. A DataError of one line is as good as an end.
template <typename Body>
void as_file_and_as_header(const uint8_t* input, size_t size, const std::string& data, const Body& body) {
  const auto run = [&](const std::string& bytes) {
    const int fd = ::memfd_create("input", 0);
    require(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    try {
      body("/proc/self/fd/" + std::to_string(fd), bytes.size());
    } catch (const parlat::DataError& error) {
      require(std::string(error.what()).find('\n') == std::string::npos);
    }
    ::close(fd);
  };
  const std::string header(reinterpret_cast<const char*>(input), size);
  run(header);
  const uint64_t length = size;
  std::string whole(sizeof(length), '\0');
  std::memcpy(whole.data(), &length, sizeof(length));
  run(whole + header + data);
}
