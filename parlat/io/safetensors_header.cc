#include "parlat/io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 12> kDtypes = {{{"F64", at::kDouble},
                                                                                  {"F32", at::kFloat},
                                                                                  {"F16", at::kHalf},
                                                                                  {"BF16", at::kBFloat16},
                                                                                  {"I64", at::kLong},
                                                                                  {"I32", at::kInt},
                                                                                  {"I16", at::kShort},
                                                                                  {"I8", at::kChar},
                                                                                  {"U8", at::kByte},
                                                                                  {"BOOL", at::kBool},
                                                                                  {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                                  {"F8_E8M0", at::kFloat8_e8m0fnu}}};
constexpr size_t kMostDimensions = 16;

// Receives the JSON piece by piece and refuses the first that does not belong:
//   {"__metadata__": {key: text}, tensor: {"dtype": text, "shape": [sizes], "data_offsets": [begin, end]}}
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(SafetensorsHeader& header, const std::string& name) : header_(header), name_(name) {}

  bool start_object(std::size_t) override {
    if (depth_ == 2 || array_ != nullptr) refuse("an object");
    if (depth_ == 1) {
      in_metadata_ = tensor_ == "__metadata__";
      const bool fresh =
          in_metadata_ ? !std::exchange(saw_metadata_, true) : header_.entries.try_emplace(tensor_).second;
      if (!fresh) throw DataError("{}: {} appears twice in the header", name_, tensor_);
      shape_.clear();
      offsets_.clear();
      seen_.fill(false);
    }
    ++depth_;
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !in_metadata_) finish_tensor();
    return true;
  }

  bool key(string_t& text) override {
    // Names are printed in errors of one line.
    if (std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < ' '; })) {
      throw DataError("{}: the header names something with a control character", name_);
    }
    (depth_ == 1 ? tensor_ : field_) = text;
    if (depth_ != 2 || in_metadata_) return true;
    const auto found = std::find(kFields.begin(), kFields.end(), text);
    if (found == kFields.end()) throw DataError("{}: {}: unknown key '{}'", name_, tensor_, text);
    if (std::exchange(seen_[found - kFields.begin()], true)) {
      throw DataError("{}: {}: {} appears twice", name_, tensor_, text);
    }
    return true;
  }

  bool string(string_t& text) override {
    if (depth_ != 2 || array_ != nullptr) refuse("a string");
    if (in_metadata_) {
      if (!header_.metadata.emplace(field_, text).second) throw DataError("{}: {} appears twice", name_, field_);
      return true;
    }
    if (field_ != "dtype") refuse("a string");
    const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.first == text; });
    if (found == kDtypes.end()) {
      throw DataError("{}: {}: unknown dtype {}", name_, tensor_, nlohmann::json(text).dump(-1, ' ', true));
    }
    header_.entries.at(tensor_).dtype = found->second;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || array_ != nullptr || field_ == "dtype") refuse("an array");
    array_ = field_ == "shape" ? &shape_ : &offsets_;
    return true;
  }

  bool end_array() override {
    array_ = nullptr;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (array_ == nullptr) refuse("a number");
    if (value > INT64_MAX) throw DataError("{}: {}: {} holds {}, beyond 64 bits", name_, tensor_, field_, value);
    if (array_->size() == kMostDimensions) throw DataError("{}: {}: {} is too long", name_, tensor_, field_);
    array_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool number_integer(number_integer_t value) override { refuse(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { refuse(text); }
  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("true or false"); }
  bool binary(binary_t&) override { refuse("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    throw DataError("{}: the header is not JSON at byte {}", name_, position);
  }

 private:
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};

  [[noreturn]] void refuse(const std::string& what) const {
    if (depth_ == 0) throw DataError("{}: expected the header to be a JSON object, got {}", name_, what);
    throw DataError("{}: {}: unexpected {} in the header", name_, tensor_ + (depth_ == 2 ? "." + field_ : ""), what);
  }

  void finish_tensor() {
    for (size_t i = 0; i < kFields.size(); ++i) {
      if (!seen_[i]) throw DataError("{}: {}: {} is missing", name_, tensor_, kFields[i]);
    }
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1]) {
      throw DataError("{}: {}: expected data_offsets [begin, end], got {}", name_, tensor_, shape_text(offsets_));
    }
    SafetensorsFile::Entry& entry = header_.entries.at(tensor_);
    // Sizes of zero count as one here, since strides are products of the others all the same.
    int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
    bool empty = false;
    for (const int64_t size : shape_) {
      empty = empty || size == 0;
      if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
        throw DataError("{}: {}: shape {} is beyond 64 bits", name_, tensor_, shape_text(shape_));
      }
    }
    if (empty) bytes = 0;
    entry.shape = shape_;
    entry.begin = offsets_[0];
    entry.end = offsets_[1];
    if (entry.end - entry.begin != bytes) {
      throw DataError("{}: {}: expected {} bytes for {} of shape {}, got {}", name_, tensor_, bytes,
                      *safetensors_dtype(entry.dtype), shape_text(shape_), entry.end - entry.begin);
    }
  }

  SafetensorsHeader& header_;
  const std::string& name_;
  int depth_ = 0;
  bool in_metadata_ = false, saw_metadata_ = false;
  std::string tensor_, field_;
  std::array<bool, 3> seen_ = {};
  std::vector<int64_t> shape_, offsets_;
  std::vector<int64_t>* array_ = nullptr;
};

// In order of their offsets the tensors must fill the data section, without hole or overlap.
void check_coverage(const SafetensorsHeader& header, int64_t data_bytes, const std::string& name) {
  std::vector<std::pair<std::string_view, const SafetensorsFile::Entry*>> order;
  for (const auto& [tensor, entry] : header.entries) order.emplace_back(tensor, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  int64_t filled = 0;
  for (const auto& [tensor, entry] : order) {
    if (entry->begin != filled) {
      throw DataError("{}: {}: expected its data to begin at {}, where the data before it end, got {} ({})", name,
                      tensor, filled, entry->begin, entry->begin < filled ? "an overlap" : "a hole");
    }
    filled = entry->end;
  }
  if (filled != data_bytes) {
    throw DataError("{}: expected {} bytes of data, got {} ({})", name, filled, data_bytes,
                    filled > data_bytes ? "the file is cut short" : "bytes nobody owns");
  }
}

}  // namespace

std::optional<std::string_view> safetensors_dtype(at::ScalarType dtype) {
  for (const auto& [text, entry] : kDtypes) {
    if (entry == dtype) return text;
  }
  return std::nullopt;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& name) {
  SafetensorsHeader header;
  HeaderHandler handler(header, name);
  nlohmann::json::sax_parse(json.begin(), json.end(), &handler);
  check_coverage(header, data_bytes, name);
  return header;
}

}  // namespace parlat
