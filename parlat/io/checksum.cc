#include "parlat/io/checksum.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "parlat/base/error.h"

namespace parlat {

namespace {

// XXH3 of 64 bits, part by part.
class Hash {
 public:
  Hash() { PARLAT_ASSERT(state_ && XXH3_64bits_reset(state_.get()) == XXH_OK, "no memory"); }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  std::string digits() const { return fmt::format("{:016x}", XXH3_64bits_digest(state_.get())); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_{XXH3_createState(), XXH3_freeState};
};

}  // namespace

nlohmann::json checksum(const std::filesystem::path& path) {
  std::error_code missing;
  // A device or a pipe may never end.
  if (std::filesystem::exists(path, missing) && !std::filesystem::is_regular_file(path, missing)) {
    throw DataError("{}: expected a regular file, got another kind", path.string());
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
  if (!file) throw DataError("{}: cannot be opened: {}", path.string(), std::strerror(errno));
  Hash hash;
  std::vector<char> block(size_t{1} << 20);
  int64_t bytes = 0;
  while (const size_t got = std::fread(block.data(), 1, block.size(), file.get())) {
    hash.add(block.data(), got);
    bytes += static_cast<int64_t>(got);
  }
  if (std::ferror(file.get())) throw DataError("{}: cannot be read: {}", path.string(), std::strerror(errno));
  return {{"bytes", bytes}, {"xxh3", hash.digits()}};
}

std::string checksum(const std::map<std::string, Tensor>& tensors) {
  Hash hash;
  for (const auto& [name, tensor] : tensors) {
    PARLAT_ASSERT(tensor.is_contiguous(), "{}", name);
    hash.add(tensor.const_data_ptr(), tensor.nbytes());
  }
  return hash.digits();
}

}  // namespace parlat
