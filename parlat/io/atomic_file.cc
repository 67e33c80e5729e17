#include "parlat/io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "parlat/base/error.h"

namespace parlat {

namespace {

bool is_same(const struct stat& file, int fd) {
  struct stat open_file = {};
  return ::fstat(fd, &open_file) == 0 && open_file.st_dev == file.st_dev && open_file.st_ino == file.st_ino;
}

}  // namespace

bool is_written_straight(const std::filesystem::path& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return false;
  return !S_ISREG(status.st_mode) || is_same(status, STDOUT_FILENO) || is_same(status, STDERR_FILENO);
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

bool write_fully(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), target_(path_) {
  if (is_written_straight(path_)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd_ < 0) fail("cannot be opened");
    return;
  }
  std::error_code missing;
  if (std::filesystem::exists(path_, missing)) target_ = std::filesystem::canonical(path_, missing);
  open_temporary();
}

void AtomicFile::open_temporary() {
  static std::atomic<int> count = 0;
  do {  // again if a process of this number was killed
    temporary_ = target_;
    temporary_ += fmt::format(".{}-{}.tmp", ::getpid(), count++);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EEXIST);
  if (fd_ < 0) fail("cannot be created");
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::move(other.temporary_)),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* doing) const {
  const int reason = errno;
  throw DataError("{}: {}: {}", path_.string(), doing, std::strerror(reason));
}

void AtomicFile::write(std::string_view bytes) {
  if (!write_fully(fd_, bytes)) fail("cannot be written");
}

bool AtomicFile::link(const std::filesystem::path& from) {
  if (temporary_.empty()) return false;
  const std::string linked = temporary_.string() + ".tmp";
  if (::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, linked.c_str(), AT_SYMLINK_FOLLOW) != 0) return false;
  if (::rename(linked.c_str(), temporary_.c_str()) == 0) return true;
  ::unlink(linked.c_str());
  return false;
}

void AtomicFile::sync() {
  // Pipes and some special files have nothing to sync.
  if (::fsync(fd_) != 0 && errno != EINVAL) fail("cannot be synced");
}

void AtomicFile::commit() {
  sync();
  const bool renames = !temporary_.empty();
  if (renames && ::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be renamed into place");
  ::close(std::exchange(fd_, -1));
  if (!renames) return;
  ::unlink(temporary_.c_str());  // renaming one name of a file to another of its names leaves both
  sync_folder(target_.parent_path());
}

}  // namespace parlat
