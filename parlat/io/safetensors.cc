#include "parlat/io/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "parlat/base/error.h"
#include "parlat/io/safetensors_header.h"

namespace parlat {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

constexpr uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kLengthBytes = sizeof(uint64_t);

}  // namespace

// The mapped file and what its header says.
struct SafetensorsFile::Mapping {
  explicit Mapping(const std::filesystem::path& path);
  ~Mapping() { ::munmap(address, size); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::string name;
  char* address = nullptr;
  size_t size = 0;
  char* data = nullptr;
  SafetensorsHeader header;

 private:
  void map(const std::filesystem::path& path);
  void parse();
};

SafetensorsFile::Mapping::Mapping(const std::filesystem::path& path) : name(path.string()) {
  map(path);
  try {
    parse();
  } catch (...) {
    ::munmap(address, size);
    throw;
  }
}

void SafetensorsFile::Mapping::map(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe is refused below
  if (fd < 0) throw DataError("{}: cannot be opened: {}", name, std::strerror(errno));
  struct stat status = {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  size = regular ? static_cast<size_t>(status.st_size) : 0;
  void* mapped = size > kLengthBytes ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  const int reason = errno;
  ::close(fd);
  if (!regular) throw DataError("{}: expected a safetensors file, got a folder or a device", name);
  if (size <= kLengthBytes) throw DataError("{}: expected a safetensors file, got {} bytes", name, size);
  if (mapped == MAP_FAILED) throw DataError("{}: cannot be mapped: {}", name, std::strerror(reason));
  address = static_cast<char*>(mapped);
}

void SafetensorsFile::Mapping::parse() {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, address, kLengthBytes);
  const uint64_t most = std::min<uint64_t>(kMostHeaderBytes, size - kLengthBytes);
  if (header_bytes > most) {
    throw DataError("{}: expected a header of at most {} bytes, got {} (cut short, or no safetensors file)", name, most,
                    header_bytes);
  }
  data = address + kLengthBytes + header_bytes;
  header = parse_safetensors_header({address + kLengthBytes, header_bytes},
                                    static_cast<int64_t>(size - kLengthBytes - header_bytes), name);
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : mapping_(std::make_shared<Mapping>(path)) {}

const std::map<std::string, SafetensorsFile::Entry>& SafetensorsFile::entries() const {
  return mapping_->header.entries;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return mapping_->header.metadata; }

Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = entries().find(name);
  if (found == entries().end()) throw DataError("{}: no tensor named {}", mapping_->name, name);
  const Entry& entry = found->second;
  char* begin = mapping_->data + entry.begin;
  // Headers of odd length are legal; tensors of misaligned memory are not.
  if (reinterpret_cast<uintptr_t>(begin) % c10::elementSize(entry.dtype) != 0) {
    Tensor copy = at::empty(entry.shape, entry.dtype);
    if (copy.numel() > 0) std::memcpy(copy.data_ptr(), begin, copy.nbytes());
    return copy;
  }
  return at::from_blob(
      begin, entry.shape, [mapping = mapping_](void*) {}, at::TensorOptions().dtype(entry.dtype));
}

namespace {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// The reference implementation's order: widest elements first, so that all data stay aligned, then by name.
NamedTensors in_file_order(NamedTensors tensors) {
  // Among equally wide dtypes, the later in this list comes first.
  constexpr at::ScalarType kOrder[] = {at::kBool,     at::kByte, at::kChar,  at::kFloat8_e4m3fn, at::kShort, at::kHalf,
                                       at::kBFloat16, at::kInt,  at::kFloat, at::kDouble,        at::kLong};
  const auto rank = [&](const Tensor& t) { return std::find(std::begin(kOrder), std::end(kOrder), t.scalar_type()); };
  std::sort(tensors.begin(), tensors.end(), [&](const auto& a, const auto& b) {
    return std::pair(rank(b.second), std::string_view(a.first)) < std::pair(rank(a.second), std::string_view(b.first));
  });
  return tensors;
}

std::string header_json(const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto dtype = safetensors_dtype(tensor.scalar_type());
    PARLAT_ASSERT(dtype, "{} is {}, which safetensors lacks", name, c10::toString(tensor.scalar_type()));
    const int64_t end = offset + static_cast<int64_t>(tensor.nbytes());
    header[name] = {{"dtype", *dtype}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  PARLAT_ASSERT(header.size() == tensors.size() + (metadata.empty() ? 0 : 1), "two tensors of one name");
  std::string text = header.dump();
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  return text;
}

}  // namespace

void stage_safetensors(AtomicFile& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const NamedTensors ordered = in_file_order(tensors);
  const std::string header = header_json(ordered, metadata);
  const uint64_t header_bytes = header.size();
  file.write({reinterpret_cast<const char*>(&header_bytes), kLengthBytes});
  file.write(header);
  for (const auto& [name, tensor] : ordered) {
    const Tensor bytes = tensor.detach().cpu().contiguous();
    file.write({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
  }
  file.sync();
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  AtomicFile file(path);
  stage_safetensors(file, tensors, metadata);
  file.commit();
}

}  // namespace parlat
