#pragma once

// What the backend of MPI has once a process (mpi.cc).

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <sched.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parlat/tensor/shape.h"

namespace parlat {

std::string mpi_error_text(int code);
// Throws CommError for anything but success.
void check_mpi(int code, const std::string& what);

// Lets other processes run: ranks may outnumber cores, and a rank that spins takes the core its peer needs.
class MpiBackoff {
 public:
  void pause() {
    if (++pauses_ < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }

 private:
  static constexpr int kYields = 200;
  static constexpr auto kSleep = std::chrono::microseconds(50);
  int pauses_ = 0;
};

class MpiProgress;

// This process among all of them: who failed, and the channel that tells it. A process is one rank of one MPI job, so
// there is one. Made by the first call, which initialises MPI.
class MpiJob {
 public:
  MpiJob();
  ~MpiJob();

  // Held by an exchange while it is under way.
  std::shared_ptr<void> under_way() const;

  // The first failure that this rank knows of counts; its own is told to the others.
  void fail(const std::string& reason);
  // Throws CommError when this rank has failed or another one has told so.
  void throw_if_failed(const std::string& what);
  bool failed() const { return failed_rank_ >= 0; }

  // These stay until the process ends.
  void strand(const std::vector<Tensor>& tensors) { stranded_.insert(stranded_.end(), tensors.begin(), tensors.end()); }

  // Returns when every rank has said that it leaves, or after the grace period. The rank that failed first comes first,
  // so that its exit code is mpirun's.
  void leave();
  void finalize();

 private:
  void tell_others(int tag, const std::string& text);
  bool receive(int tag);
  void hear_failure();

  MPI_Comm control_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int failed_rank_ = -1;
  std::string reason_;
  int sender_ = -1;
  std::string text_;
  std::vector<Tensor> stranded_;
  std::unique_ptr<MpiProgress> progress_;
};

// Null until it is made, and once it is finalised.
std::shared_ptr<MpiJob>& mpi_job();

}  // namespace parlat
