// Ranks as processes under mpirun. Blocks travel as bytes by Isend and Irecv; waiting polls, so that a failed or silent
// peer ends the wait. A rank calls MPI from one thread; while its exchanges are under way, another keeps them moving.
#include <ATen/ATen.h>
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/comm/communicator.h"
#include "parlat/comm/mpi_job.h"

namespace parlat {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{1} << 30;  // MPI counts are ints

// One exchange under way, in messages of at most kChunkBytes.
struct Pending {
  struct Message {
    int peer;
    int receive_bytes;  // kSent: goes to the peer
  };
  static constexpr int kSent = -1;

  std::string what;
  std::vector<Tensor> send, receive;
  std::vector<MPI_Request> requests;
  std::vector<Message> messages;  // of each request
  std::shared_ptr<void> under_way;
};

class MpiCommunicator final : public Communicator {
 public:
  // Owns comm. members: world rank of each rank.
  MpiCommunicator(MPI_Comm comm, std::vector<int> members, std::shared_ptr<Traffic> traffic, CommOptions options)
      : Communicator(rank_in(comm), static_cast<int>(members.size()), std::move(traffic)),
        comm_(comm),
        members_(std::move(members)),
        options_(options),
        job_(mpi_job()) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    int* bound = nullptr;
    int set = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &bound, &set);
    if (set) tag_bound_ = *bound;
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && !job_->failed()) MPI_Comm_free(&comm_);
  }

  std::unique_ptr<Communicator> split(int color) override {
    // The exchange comes first because MPI_Comm_split has no timeout: after it every rank is known to be here.
    const std::vector<int> ranks = ranks_of_color(color);
    MPI_Comm group = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, color, rank_, &group), "split");
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(members_[rank]);
    return std::make_unique<MpiCommunicator>(group, std::move(members), traffic_, options_);
  }

  void fail(const std::string& reason) override { job_->fail(reason); }
  const char* backend() const override { return "mpi"; }

 protected:
  Handle do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) override;

 private:
  static int rank_in(MPI_Comm comm) {
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    return rank;
  }

  void start(Pending& pending);
  void finish(Pending& pending);
  void check_arrivals(Pending& pending, std::vector<MPI_Status>& statuses, bool has_errors);
  void strand(const Pending& pending);
  [[noreturn]] void give_up(const Pending& pending, const std::string& reason);
  std::string late_ranks(const Pending& pending) const;

  MPI_Comm comm_;
  const std::vector<int> members_;
  const CommOptions options_;
  const std::shared_ptr<MpiJob> job_;
  int tag_bound_ = 32767;
  size_t exchanges_ = 0;
};

Handle MpiCommunicator::do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) {
  job_->throw_if_failed(what);
  const auto pending = std::make_shared<Pending>();
  pending->what = what;
  pending->send = std::move(send);
  pending->receive = std::move(receive);
  start(*pending);
  pending->under_way = job_->under_way();
  return Handle([this, pending] { finish(*pending); });
}

void MpiCommunicator::start(Pending& pending) {
  // A rank that is in another exchange has another tag, so the two never take each other's bytes.
  const size_t key = exchanges_++ * 31 + std::hash<std::string>()(pending.what);
  const int tag = static_cast<int>(key % static_cast<size_t>(tag_bound_));
  // An empty tensor is a message of no bytes, so that a peer which expects some notices.
  const auto add = [&](const Tensor& tensor, int peer, bool sends) {
    if (!tensor.defined()) return;
    auto* data = static_cast<char*>(tensor.data_ptr());
    auto left = static_cast<int64_t>(tensor.nbytes());
    do {
      const int bytes = static_cast<int>(std::min(left, kChunkBytes));
      MPI_Request request;
      const int code = sends ? MPI_Isend(data, bytes, MPI_BYTE, peer, tag, comm_, &request)
                             : MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, comm_, &request);
      if (code != MPI_SUCCESS) give_up(pending, fmt::format("{}: {}", pending.what, mpi_error_text(code)));
      pending.requests.push_back(request);
      pending.messages.push_back({peer, sends ? Pending::kSent : bytes});
      left -= bytes, data += bytes;
    } while (left > 0);
  };
  // Every rank begins with its right neighbour, so that no rank is everybody's first.
  for (int i = 1; i < size_; ++i) add(pending.receive[(rank_ + size_ - i) % size_], (rank_ + size_ - i) % size_, false);
  for (int i = 1; i < size_; ++i) add(pending.send[(rank_ + i) % size_], (rank_ + i) % size_, true);
  const Tensor& own = pending.receive[rank_];
  if (own.defined() && own.nbytes() > 0 && own.data_ptr() != pending.send[rank_].data_ptr()) {
    std::memcpy(own.data_ptr(), pending.send[rank_].data_ptr(), own.nbytes());
  }
}

void MpiCommunicator::finish(Pending& pending) {
  const auto deadline = Clock::now() + options_.timeout;
  const int count = static_cast<int>(pending.requests.size());
  std::vector<MPI_Status> statuses(count);
  MpiBackoff backoff;
  while (true) {
    int done = 0;
    const int code = MPI_Testall(count, pending.requests.data(), &done, statuses.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
      give_up(pending, fmt::format("{}: {}", pending.what, mpi_error_text(code)));
    }
    if (done || code != MPI_SUCCESS) return check_arrivals(pending, statuses, code == MPI_ERR_IN_STATUS);
    try {
      job_->throw_if_failed(pending.what);
    } catch (const CommError&) {
      strand(pending);
      throw;
    }
    if (Clock::now() > deadline) {
      give_up(pending, fmt::format("{}: no answer from {} within {} s", pending.what, late_ranks(pending),
                                   std::chrono::duration<double>(options_.timeout).count()));
    }
    backoff.pause();
  }
}

// MPI takes a message that is shorter than what was expected without a word.
void MpiCommunicator::check_arrivals(Pending& pending, std::vector<MPI_Status>& statuses, bool has_errors) {
  for (size_t i = 0; i < statuses.size(); ++i) {
    const auto& [peer, expected] = pending.messages[i];
    const int code = has_errors ? statuses[i].MPI_ERROR : MPI_SUCCESS;
    if (code != MPI_SUCCESS && code != MPI_ERR_PENDING) {
      give_up(pending, fmt::format("{}: {} bytes expected from rank {}: {}", pending.what, expected, members_[peer],
                                   mpi_error_text(code)));
    }
    int received = expected;
    if (expected != Pending::kSent && code == MPI_SUCCESS) MPI_Get_count(&statuses[i], MPI_BYTE, &received);
    if (received != expected) {
      give_up(pending, fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {}", pending.what,
                                   members_[peer], received, members_[rank_], expected));
    }
  }
}

// MPI may still write to the buffers of a failed exchange.
void MpiCommunicator::strand(const Pending& pending) {
  job_->strand(pending.send);
  job_->strand(pending.receive);
}

void MpiCommunicator::give_up(const Pending& pending, const std::string& reason) {
  strand(pending);
  job_->fail(reason);
  throw CommError("{}", reason);
}

std::string MpiCommunicator::late_ranks(const Pending& pending) const {
  std::vector<bool> late(size_);
  for (size_t i = 0; i < pending.requests.size(); ++i) {
    int done = 0;
    MPI_Request_get_status(pending.requests[i], &done, MPI_STATUS_IGNORE);
    if (!done) late[pending.messages[i].peer] = true;
  }
  std::string text;
  for (int p = 0; p < size_; ++p) {
    if (late[p]) text += fmt::format("{}rank {}", text.empty() ? "" : ", ", members_[p]);
  }
  return text;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(CommOptions options) {
  if (!mpi_job()) mpi_job() = std::make_shared<MpiJob>();
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  int size = 0;
  MPI_Comm_size(comm, &size);
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<MpiCommunicator>(comm, std::move(members), std::make_shared<Traffic>(), options);
}

void finalize_mpi() {
  if (!mpi_job()) return;
  if (mpi_job()->failed()) {
    mpi_job()->leave();
  } else {
    mpi_job()->finalize();
    mpi_job().reset();
  }
}

}  // namespace parlat
