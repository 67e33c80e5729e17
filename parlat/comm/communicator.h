#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parlat/comm/traffic.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// An exchange under way. wait() returns when everything arrived and the sent buffers may be reused; it throws CommError
// that names the collective and the ranks that did not answer when the timeout passes or a peer failed. A handle
// dropped unwaited waits in its destructor and swallows the error.
class Handle {
 public:
  Handle() = default;
  explicit Handle(std::function<void()> finish) : finish_(std::move(finish)) {}
  Handle(Handle&& other) noexcept : finish_(std::exchange(other.finish_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(finish_, other.finish_);
    return *this;
  }
  ~Handle();
  void wait();

 private:
  std::function<void()> finish_;
};

// The ranks of one group and how they exchange tensors. Public calls check, count bytes and dispatch; a backend only
// moves blocks of bytes. Every rank of the group must issue the same calls in the same order; `what` names the exchange
// in errors ("laga query"). Sizes may be uneven and empty. One rank: the identity, nothing is sent.
// Reductions exchange the parts and sum them in fp32 (fp64 for fp64) in rank order, so every backend, and every run,
// gives the same bits. All tensors must be contiguous on the CPU; receive sides are written in place.
class Communicator {
 public:
  virtual ~Communicator() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  Traffic& traffic() { return *traffic_; }

  // send[p] goes to rank p, receive[p] comes from rank p.        sent: the bytes of all send[p], p != rank
  Handle all_to_all(std::vector<Tensor> send, std::vector<Tensor> receive, std::string what);
  // receive[p] is rank p's shard.                                sent: (P-1) shards
  Handle all_gather(Tensor shard, std::vector<Tensor> receive, std::string what);
  // parts[p] is this rank's summand of rank p's sum.             sent: the bytes of all parts[p], p != rank
  Handle reduce_scatter(std::vector<Tensor> parts, Tensor sum, std::string what);
  // In place: reduce-scatter of even shares (done when this returns), then gather (done after wait()).
  //                                                              sent: 2 (P-1)/P of the tensor, averaged over ranks
  Handle all_reduce(Tensor tensor, std::string what);
  // Both directions at once; to or from may be this rank.        sent: the tensor
  Handle send_recv(Tensor send, int to, Tensor receive, int from, std::string what);
  // In place from root.                                          sent by root: (P-1) tensors
  Handle broadcast(Tensor tensor, int root, std::string what);
  // Returns when every rank has called it.                        sent: counted as nothing
  void barrier(std::string what);

  // Largest and sum of one number over ranks, for decisions that all ranks must take alike. Counted as all_reduce.
  //                                                              sent: 8 (P-1) bytes
  double max_over_ranks(double value, std::string what);
  double sum_over_ranks(double value, std::string what);

  // Ranks of equal color (>= 0) form a group, ordered by rank. Shares this rank's Traffic; the setup is not counted.
  virtual std::unique_ptr<Communicator> split(int color) = 0;
  // Tells the other ranks that this one failed and why; what they wait for then throws CommError with this text (its
  // first line).
  virtual void fail(const std::string& reason) = 0;
  virtual const char* backend() const = 0;  // local, mpi

 protected:
  Communicator(int rank, int size, std::shared_ptr<Traffic> traffic)
      : rank_(rank), size_(size), traffic_(std::move(traffic)) {}
  // Starts moving the bytes of send[p] to every p and of receive[p] from every p at once (own ones: a copy). Undefined
  // tensors move nothing, and their peer has one too. wait() completes both directions; the backend keeps the tensors
  // alive until then.
  virtual Handle do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) = 0;
  // The ranks of this group that passed the same color, increasing. Collective.
  std::vector<int> ranks_of_color(int color);

  const int rank_;
  const int size_;
  const std::shared_ptr<Traffic> traffic_;

 private:
  // do_exchange, after what leaves this rank has been counted.
  Handle counted_exchange(Collective kind, std::vector<Tensor> send, std::vector<Tensor> receive,
                          const std::string& what, bool second_phase = false);
  // Of every rank. Without a kind it is not counted.
  std::vector<double> gather_numbers(double value, const std::string& what, std::optional<Collective> kind = {});
};

struct CommOptions {
  std::chrono::milliseconds timeout{60000};
};

// Runs body(comm) on `ranks` threads of this process, one intra-op thread each unless `threads` says otherwise. When a
// rank throws, the others are failed; the first error (in time) that is not an echo of another rank's is rethrown. A
// rank that has not returned a timeout (at least 5 s) after that is reported, and the process ends with exit code 4.
void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body, int threads = 1,
                     CommOptions options = {});

// The ranks that mpirun started (MPI_COMM_WORLD). Throws ConfigError where this build has no MPI. Initialises MPI once;
// finalize_mpi is called at the program's end.
std::unique_ptr<Communicator> make_mpi_communicator(CommOptions options = {});
// After a failure: gives the other ranks a few seconds to report what they know, then returns without MPI_Finalize
// (which would block), so that the program can exit with its own code.
void finalize_mpi();

// Runs body on this process's rank of MPI_COMM_WORLD. What body throws is told to the other ranks and rethrown. The
// caller reports it and calls finalize_mpi() last.
void run_mpi_rank(const std::function<void(Communicator&)>& body, int threads = 1, CommOptions options = {});

}  // namespace parlat
