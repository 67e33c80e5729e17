#include "parlat/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/range.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

void check_tensors(const std::vector<Tensor>& tensors, int ranks, at::ScalarType dtype, const std::string& what) {
  PARLAT_ASSERT(static_cast<int>(tensors.size()) == ranks, "'{}': {} tensors for {} ranks", what, tensors.size(),
                ranks);
  for (const Tensor& tensor : tensors) {
    PARLAT_ASSERT(tensor.defined() && (tensor.is_cpu() || tensor.is_meta()) && tensor.is_contiguous(), "'{}'", what);
    PARLAT_ASSERT(tensor.scalar_type() == dtype, "'{}': {} and {}", what, name(tensor.scalar_type()), name(dtype));
  }
}

at::ScalarType accumulator_of(at::ScalarType dtype, const std::string& what) {
  switch (dtype) {
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
      return at::kFloat;
    case at::kDouble:
    case at::kLong:
      return dtype;
    default:
      throw InternalError(fmt::format("'{}': no sum over ranks of {}", what, name(dtype)));
  }
}

// Writes the sum of parts, added in rank order, to `sum`, which is a tensor of its own or parts[rank]. Overwrites
// parts[0] unless rank is 0.
void sum_in_rank_order(const std::vector<Tensor>& parts, int rank, const Tensor& sum, at::ScalarType accumulator) {
  const at::NoGradGuard no_grad;
  const bool same_dtype = accumulator == sum.scalar_type();
  const Tensor total = !same_dtype ? parts[0].to(accumulator) : rank == 0 ? sum.copy_(parts[0]) : parts[0];
  for (size_t p = 1; p < parts.size(); ++p) total.add_(parts[p].to(accumulator));
  if (!total.is_same(sum)) sum.copy_(total);
}

// Buffers like `part` for what the other ranks send; nothing for this one.
std::vector<Tensor> receive_like(const Tensor& part, int ranks, int rank) {
  std::vector<Tensor> receive;
  for (int p = 0; p < ranks; ++p) {
    receive.push_back(p == rank ? at::empty({0}, part.options())
                                : metered("exchange buffers", at::empty(part.sizes(), part.options())));
  }
  return receive;
}

}  // namespace

Handle::~Handle() {
  try {
    wait();
  } catch (const std::exception&) {  // the next exchange reports it
  }
}

void Handle::wait() {
  if (const auto finish = std::exchange(finish_, nullptr)) finish();
}

Handle Communicator::counted_exchange(Collective kind, std::vector<Tensor> send, std::vector<Tensor> receive,
                                      const std::string& what, bool second_phase) {
  Traffic::Entry& entry = (*traffic_)[kind];
  entry.calls += !second_phase;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_ || !send[p].defined()) continue;
    if (send[p].is_meta() && std::string_view(backend()) != "local") {
      throw ConfigError("'{}': expected values to send to another process, got shapes alone (a dry run)", what);
    }
    entry.elements += send[p].numel();
    entry.bytes += static_cast<int64_t>(send[p].nbytes());
  }
  return do_exchange(std::move(send), std::move(receive), what);
}

Handle Communicator::all_to_all(std::vector<Tensor> send, std::vector<Tensor> receive, std::string what) {
  PARLAT_ASSERT(!send.empty() && send[0].defined(), "'{}'", what);
  check_tensors(send, size_, send[0].scalar_type(), what);
  check_tensors(receive, size_, send[0].scalar_type(), what);
  PARLAT_ASSERT(send[rank_].numel() == receive[rank_].numel(), "'{}': {} and {} elements", what, send[rank_].numel(),
                receive[rank_].numel());
  return counted_exchange(Collective::kAllToAll, std::move(send), std::move(receive), what);
}

Handle Communicator::all_gather(Tensor shard, std::vector<Tensor> receive, std::string what) {
  check_tensors({shard}, 1, shard.scalar_type(), what);
  check_tensors(receive, size_, shard.scalar_type(), what);
  PARLAT_ASSERT(shard.numel() == receive[rank_].numel(), "'{}': {} and {} elements", what, shard.numel(),
                receive[rank_].numel());
  if (size_ > 1) (*traffic_)[Collective::kAllGather].shard_elements += shard.numel();
  return counted_exchange(Collective::kAllGather, std::vector<Tensor>(size_, shard), std::move(receive), what);
}

Handle Communicator::reduce_scatter(std::vector<Tensor> parts, Tensor sum, std::string what) {
  check_tensors({sum}, 1, sum.scalar_type(), what);
  check_tensors(parts, size_, sum.scalar_type(), what);
  PARLAT_ASSERT(parts[rank_].sizes() == sum.sizes(), "'{}': {} and {}", what, shape_text(parts[rank_].sizes()),
                shape_text(sum.sizes()));
  const at::ScalarType accumulator = accumulator_of(sum.scalar_type(), what);
  const Tensor own = parts[rank_];
  std::vector<Tensor> receive = receive_like(sum, size_, rank_);
  parts[rank_] = receive[rank_];
  auto arrival =
      std::make_shared<Handle>(counted_exchange(Collective::kReduceScatter, std::move(parts), receive, what));
  receive[rank_] = own;
  return Handle([arrival, receive = std::move(receive), sum, accumulator, rank = rank_] {
    arrival->wait();
    sum_in_rank_order(receive, rank, sum, accumulator);
  });
}

Handle Communicator::all_reduce(Tensor tensor, std::string what) {
  check_tensors({tensor}, 1, tensor.scalar_type(), what);
  const at::ScalarType accumulator = accumulator_of(tensor.scalar_type(), what);
  const at::NoGradGuard no_grad;
  const Tensor flat = tensor.view({-1});
  std::vector<Tensor> shares;
  for (int p = 0; p < size_; ++p) {
    const Range share = even_share(flat.numel(), size_, p);
    shares.push_back(flat.narrow(0, share.begin, share.size()));
  }
  const Tensor own = shares[rank_];
  std::vector<Tensor> receive = receive_like(own, size_, rank_);
  std::vector<Tensor> send = shares;
  send[rank_] = receive[rank_];
  counted_exchange(Collective::kAllReduce, std::move(send), receive, what).wait();
  receive[rank_] = own;
  sum_in_rank_order(receive, rank_, own, accumulator);
  return counted_exchange(Collective::kAllReduce, std::vector<Tensor>(size_, own), std::move(shares), what,
                          /*second_phase=*/true);
}

Handle Communicator::send_recv(Tensor send, int to, Tensor receive, int from, std::string what) {
  check_tensors({send}, 1, send.scalar_type(), what);
  check_tensors({receive}, 1, send.scalar_type(), what);
  PARLAT_ASSERT(0 <= to && to < size_ && 0 <= from && from < size_ && (to == rank_) == (from == rank_),
                "'{}': rank {} sends to {} and receives from {}", what, rank_, to, from);
  PARLAT_ASSERT(to != rank_ || send.numel() == receive.numel(), "'{}': {} and {} elements", what, send.numel(),
                receive.numel());
  std::vector<Tensor> sends(size_), receives(size_);
  sends[to] = send;
  receives[from] = receive;
  return counted_exchange(Collective::kSendRecv, std::move(sends), std::move(receives), what);
}

Handle Communicator::broadcast(Tensor tensor, int root, std::string what) {
  check_tensors({tensor}, 1, tensor.scalar_type(), what);
  PARLAT_ASSERT(0 <= root && root < size_, "'{}': root {} of {} ranks", what, root, size_);
  std::vector<Tensor> send(size_), receive(size_);
  if (rank_ == root) {
    std::fill(send.begin(), send.end(), tensor);
    send[root] = Tensor();
  } else {
    receive[root] = tensor;
  }
  return counted_exchange(Collective::kBroadcast, std::move(send), std::move(receive), what);
}

void Communicator::barrier(std::string what) {
  ++(*traffic_)[Collective::kBarrier].calls;
  gather_numbers(0, what);
}

double Communicator::max_over_ranks(double value, std::string what) {
  const std::vector<double> values = gather_numbers(value, what, Collective::kAllReduce);
  return *std::max_element(values.begin(), values.end());
}

double Communicator::sum_over_ranks(double value, std::string what) {
  double sum = 0;
  for (const double part : gather_numbers(value, what, Collective::kAllReduce)) sum += part;
  return sum;
}

std::vector<double> Communicator::gather_numbers(double value, const std::string& what,
                                                 std::optional<Collective> kind) {
  const at::NoGradGuard no_grad;
  const Tensor own = at::full({1}, value, at::kDouble);
  const Tensor all = at::empty({size_}, at::kDouble);
  std::vector<Tensor> receive;
  for (int p = 0; p < size_; ++p) receive.push_back(all.narrow(0, p, 1));
  std::vector<Tensor> send(size_, own);
  (kind ? counted_exchange(*kind, std::move(send), std::move(receive), what)
        : do_exchange(std::move(send), std::move(receive), what))
      .wait();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + size_};
}

std::vector<int> Communicator::ranks_of_color(int color) {
  PARLAT_ASSERT(color >= 0, "color {}", color);
  const std::vector<double> colors = gather_numbers(color, "split");
  std::vector<int> ranks;
  for (int p = 0; p < size_; ++p) {
    if (colors[p] == color) ranks.push_back(p);
  }
  return ranks;
}

void run_mpi_rank(const std::function<void(Communicator&)>& body, int threads, CommOptions options) {
  const std::unique_ptr<Communicator> comm = make_mpi_communicator(options);
  at::set_num_threads(threads);
  try {
    body(*comm);
  } catch (const std::exception& error) {
    comm->fail(error.what());
    throw;
  }
}

}  // namespace parlat
