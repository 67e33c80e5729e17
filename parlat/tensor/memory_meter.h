#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace parlat {

class SiteLedger;

// Bytes that torch allocates on this thread while a scope is open: what lives now and the peak. Each rank is a thread,
// so a scope measures one rank; torch carries the scope into the backward pass. Storage allocated before the scope
// opened and freed inside it would count negative, so open the scope before the tensors of interest exist. Tensors of
// the meta device count once prepare_meta_device was called (parlat/tensor/meta_device.h).
class MemoryMeter {
 public:
  // with_sites: also which tensors they were; costs a lookup in a table for each allocation.
  explicit MemoryMeter(bool with_sites = false);
  ~MemoryMeter();

  int64_t current_bytes() const;
  int64_t peak_bytes() const;
  // Peak and current start again from 0: what already lives is not counted.
  void reset();

  struct Site {
    std::string name;
    int64_t bytes;
  };
  // What lived at the peak by the names that metered() gave, largest first; what has none is "unnamed". They add up to
  // peak_bytes(). Empty unless with_sites.
  std::vector<Site> peak_sites() const;

  class Scope {
   public:
    explicit Scope(MemoryMeter& meter);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::unique_ptr<c10::DebugInfoGuard> guard_;
  };

 private:
  friend class MeterReporter;
  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
  const std::unique_ptr<SiteLedger> sites_;
};

// x, whose memory is from now on, and in a peak that it was already part of, what `site` says ("probabilities"): the
// last name counts. Without a meter that asks for sites nothing happens.
at::Tensor metered(std::string_view site, at::Tensor x);

}  // namespace parlat
