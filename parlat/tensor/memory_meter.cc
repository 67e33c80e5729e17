#include "parlat/tensor/memory_meter.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace parlat {

// Who holds how much. Blocks are known by the context of their storage, which allocators report as their address.
class SiteLedger {
 public:
  void allocated(void* block, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[block] = {kUnnamed, bytes, ++births_};
    now_[kUnnamed] += bytes;
    total_ += bytes;
    if (total_ <= peak_) return;
    peak_ = total_;
    at_peak_ = now_;
    births_at_peak_ = births_;
  }

  void freed(void* block, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    now_[found == blocks_.end() ? kUnnamed : found->second.site] -= bytes;
    total_ -= bytes;
    if (found != blocks_.end()) blocks_.erase(found);
  }

  void rename(void* block, std::string_view name) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    Block& b = found->second;
    const size_t site = site_of(name);
    move(now_, b, site);
    if (b.birth <= births_at_peak_) move(at_peak_, b, site);  // it has lived since
    b.site = site;
  }

  std::vector<MemoryMeter::Site> at_peak() const {
    const std::lock_guard lock(mutex_);
    std::vector<MemoryMeter::Site> sites;
    for (const auto& [name, site] : numbers_) {
      if (site < at_peak_.size() && at_peak_[site] != 0) sites.push_back({name, at_peak_[site]});
    }
    std::stable_sort(sites.begin(), sites.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    return sites;
  }

  void reset() {
    const std::lock_guard lock(mutex_);
    blocks_.clear();
    std::fill(now_.begin(), now_.end(), 0);
    at_peak_.clear();
    total_ = peak_ = 0;
  }

 private:
  static constexpr size_t kUnnamed = 0;
  struct Block {
    size_t site;
    int64_t bytes, birth;
  };

  size_t site_of(std::string_view name) {
    const auto found = numbers_.find(name);
    if (found != numbers_.end()) return found->second;
    now_.push_back(0);
    return numbers_.emplace(name, now_.size() - 1).first->second;
  }

  static void move(std::vector<int64_t>& bytes, const Block& block, size_t site) {
    if (bytes.size() <= site) bytes.resize(site + 1, 0);
    bytes[block.site] -= block.bytes;
    bytes[site] += block.bytes;
  }

  mutable std::mutex mutex_;  // threads of one rank share its meter
  std::unordered_map<void*, Block> blocks_;
  std::map<std::string, size_t, std::less<>> numbers_ = {{"unnamed", kUnnamed}};
  std::vector<int64_t> now_ = {0}, at_peak_;  // bytes by site
  int64_t total_ = 0, peak_ = 0;
  int64_t births_ = 0, births_at_peak_ = 0;
};

class MeterReporter final : public c10::MemoryReportingInfoBase {
 public:
  explicit MeterReporter(MemoryMeter& meter) : meter_(meter) {}

  void reportMemoryUsage(void* block, int64_t alloc_size, size_t, size_t, c10::Device) override {
    const int64_t now = meter_.current_.fetch_add(alloc_size) + alloc_size;
    int64_t peak = meter_.peak_.load();
    while (now > peak && !meter_.peak_.compare_exchange_weak(peak, now)) {
    }
    if (sites() == nullptr) return;
    alloc_size > 0 ? sites()->allocated(block, alloc_size) : sites()->freed(block, -alloc_size);
  }
  bool memoryProfilingEnabled() const override { return true; }
  SiteLedger* sites() const { return meter_.sites_.get(); }

 private:
  MemoryMeter& meter_;
};

MemoryMeter::MemoryMeter(bool with_sites) : sites_(with_sites ? std::make_unique<SiteLedger>() : nullptr) {}
MemoryMeter::~MemoryMeter() = default;

int64_t MemoryMeter::current_bytes() const { return current_.load(); }
int64_t MemoryMeter::peak_bytes() const { return peak_.load(); }

void MemoryMeter::reset() {
  current_ = 0;
  peak_ = 0;
  if (sites_) sites_->reset();
}

std::vector<MemoryMeter::Site> MemoryMeter::peak_sites() const {
  return sites_ ? sites_->at_peak() : std::vector<Site>();
}

MemoryMeter::Scope::Scope(MemoryMeter& meter)
    : guard_(std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE,
                                                   std::make_shared<MeterReporter>(meter))) {}
MemoryMeter::Scope::~Scope() = default;

at::Tensor metered(std::string_view site, at::Tensor x) {
  auto* const info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  if (info == nullptr || !x.defined()) return x;
  const auto* const reporter = dynamic_cast<MeterReporter*>(info);
  if (reporter != nullptr && reporter->sites() != nullptr) {
    reporter->sites()->rename(x.storage().data_ptr().get_context(), site);
  }
  return x;
}

}  // namespace parlat
