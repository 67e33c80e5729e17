#pragma once

#include <ATen/Parallel.h>

namespace parlat {

// So many intra-op threads on this thread for as long as it lives: what a machine's cores or OMP_NUM_THREADS would
// otherwise decide.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(at::get_num_threads()) { at::set_num_threads(threads); }
  ~ThreadCount() { at::set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

}  // namespace parlat
