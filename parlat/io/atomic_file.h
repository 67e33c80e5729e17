#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace parlat {

// A file that appears under its name complete or not at all: bytes go to NAME.tmp in the same folder, commit() syncs
// and renames it. Without commit, the destructor removes it. Every method throws DataError with path and reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  void write(std::string_view bytes);
  void sync();    // to disk, under the temporary name
  void commit();  // sync, rename, sync the folder

 private:
  [[noreturn]] void fail(const char* doing) const;
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
};

// write(2) until all is written; false with errno set.
bool write_fully(int fd, std::string_view bytes);

}  // namespace parlat
