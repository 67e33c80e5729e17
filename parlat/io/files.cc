#include "parlat/io/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* doing) {
  const int reason = errno;
  throw DataError("{}: {}: {}", path.string(), doing, std::strerror(reason));
}

class Descriptor {
 public:
  explicit Descriptor(const std::filesystem::path& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail(path, "cannot be opened");
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The lines to keep, each with its newline.
std::string kept_lines(const std::filesystem::path& path, const std::function<bool(const nlohmann::json&)>& keep) {
  const std::string bytes = read_file(path);
  std::string kept;
  size_t number = 1;
  for (size_t begin = 0; begin < bytes.size(); ++number) {
    const size_t end = bytes.find('\n', begin);
    if (end == std::string::npos) break;  // cut short by a crash
    const std::string line = bytes.substr(begin, end - begin);
    begin = end + 1;
    if (line.empty()) continue;
    const std::string name = fmt::format("{}: line {}", path.string(), number);
    const nlohmann::json parsed = parse_json(line, name);
    if (!parsed.is_object()) throw DataError("{}: expected a JSON object, got {}", name, parsed.type_name());
    if (keep(parsed)) kept += line + '\n';
  }
  return kept;
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const Descriptor file(path);
  struct stat status = {};
  std::string bytes;
  if (::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode)) bytes.reserve(static_cast<size_t>(status.st_size));
  constexpr size_t kBlock = size_t{1} << 20;
  for (;;) {
    const size_t had = bytes.size();
    bytes.resize(had + kBlock);
    const ssize_t got = ::read(file.get(), bytes.data() + had, kBlock);
    if (got < 0 && errno != EINTR) fail(path, "cannot be read");
    bytes.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return bytes;
  }
}

nlohmann::json read_json(const std::filesystem::path& path) { return parse_json(read_file(path), path.string()); }

void create_folders(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw DataError("{}: cannot be created: {}", path.string(), error.message());
}

FolderLock::FolderLock(const std::filesystem::path& folder)
    : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0) fail(folder, "cannot be opened");
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(fd_);
  throw ConfigError("{}: expected a folder that no other run writes to, got one in use", folder.string());
}

FolderLock::~FolderLock() { ::close(fd_); }

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

void check_text(std::string_view bytes, const std::string& name) {
  if (bytes.empty()) throw DataError("{}: expected text, got an empty file", name);
  if (const auto offset = find_invalid_utf8(bytes)) {
    throw DataError("{}: expected UTF-8 text, got byte 0x{:02x} at offset {}", name,
                    static_cast<unsigned char>(bytes[*offset]), *offset);
  }
}

std::string read_text(const std::filesystem::path& path) {
  std::string text = read_file(path);
  check_text(text, path.string());
  return text;
}

JsonLines::JsonLines(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep)
    : path_(std::move(path)) {
  std::error_code missing;
  const bool resume = keep && std::filesystem::exists(path_, missing);
  write_file_atomically(path_, resume ? kept_lines(path_, keep) : "");
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd_ < 0) fail(path_, "cannot be opened");
}

JsonLines::~JsonLines() { ::close(fd_); }

void JsonLines::write(const nlohmann::json& line) {
  if (!write_fully(fd_, line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n'))
    fail(path_, "cannot be written");
}

}  // namespace parlat
