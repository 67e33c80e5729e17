#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace parlat {

// Whole file as bytes; DataError names the path and the system's reason.
std::string read_file(const std::filesystem::path& path);

// Parsed JSON (parlat/base/json.h); DataError names the path and the position.
nlohmann::json read_json(const std::filesystem::path& path);

// A folder and those above it, unless they exist. DataError.
void create_folders(const std::filesystem::path& path);

// A folder that nobody else has while this lives, in this process or another; the system forgets it when the process
// ends. Throws ConfigError where somebody has it. File systems without locks are not guarded.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

// Writes through a temporary name in the same folder, fsync, rename, fsync of the folder. DataError; the old file
// stays.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

// UTF-8 text; DataError where the file is empty or not UTF-8 (naming the first bad byte's offset).
std::string read_text(const std::filesystem::path& path);

// The same of bytes already in memory; `name` is what errors call them.
void check_text(std::string_view bytes, const std::string& name);

// Appends one JSON object a line, each with one write; used for metrics.
class JsonLines {
 public:
  // Keeps the lines of an existing file for which keep(line) holds (resuming), or starts an empty one. A last line cut
  // short by a crash is dropped; any other that is not a JSON object is a DataError.
  explicit JsonLines(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep = nullptr);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  // DataError (disk full).
  void write(const nlohmann::json& line);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace parlat
