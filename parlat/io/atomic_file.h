#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace parlat {

// A file that appears under its name complete or not at all: bytes go to a temporary name in the same folder that ends
// in .tmp and that nobody else uses, commit() syncs and renames it. Without commit, the destructor removes it. A link
// is followed: what it names is replaced. Where there is a device or a pipe, or what stdout or stderr go to, the bytes
// are written straight to it. Every method throws DataError with path and reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  void write(std::string_view bytes);
  // Instead of bytes of its own: becomes another name of a file (of what it names, if it is a link). False, and nothing
  // has changed, where the file system cannot.
  bool link(const std::filesystem::path& from);
  void sync();    // to disk, under the temporary name
  void commit();  // sync, rename, sync the folder

 private:
  void open_temporary();
  [[noreturn]] void fail(const char* doing) const;
  std::filesystem::path path_, target_, temporary_;  // no temporary: written straight
  int fd_ = -1;
};

// A device, a pipe, or what stdout or stderr go to: not a file that another may take the place of.
bool is_written_straight(const std::filesystem::path& path);

// write(2) until all is written; false with errno set.
bool write_fully(int fd, std::string_view bytes);

// A rename is durable once its folder is synced. Folders that cannot be opened or synced (some network file systems)
// are left: what is in them is complete all the same.
void sync_folder(const std::filesystem::path& folder);

}  // namespace parlat
