#pragma once

#include <ATen/ATen.h>

#include "parlat/base/error.h"
#include "parlat/comm/communicator.h"
#include "parlat/comm/differentiable.h"
#include "parlat/tensor/fill.h"
#include "tests/shard_indices.h"

namespace parlat {

// What every backend must do, as bodies that a rank runs: each checks its results against what it computes by itself
// and returns them, so that backends and runs can be compared bit for bit. Run on threads by comm_test and by mpirun.
struct CommCase {
  const char* name;
  std::vector<Tensor> (*run)(Communicator&);
};

inline void expect_equal(const Tensor& got, const Tensor& want, const std::string& what) {
  PARLAT_ASSERT(got.sizes() == want.sizes(), "{}: {} and {}", what, shape_text(got.sizes()), shape_text(want.sizes()));
  if (at::equal(got, want)) return;
  const Tensor where = (got != want).nonzero()[0];
  std::vector<int64_t> index(where.data_ptr<int64_t>(), where.data_ptr<int64_t>() + where.numel());
  std::vector<at::indexing::TensorIndex> at_index(index.begin(), index.end());
  PARLAT_ASSERT(false, "{}: {}: got {}, want {}", what, shape_text(index), got.index(at_index).item<double>(),
                want.index(at_index).item<double>());
}

// Whole numbers that tell their position and salt, exact in every dtype.
inline Tensor coded(at::IntArrayRef shape, int64_t salt, at::ScalarType dtype = at::kFloat) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return ((at::arange(count, at::kLong) * 7 + salt * 37) % 251).to(dtype).view(shape);
}

// What `from` has for `to`: sizes 0 to 6.
inline Tensor message(int from, int to, at::ScalarType dtype) {
  return coded({(from * 3 + to * 5 + 2) % 7, 3}, from * 64 + to, dtype);
}

inline std::vector<at::ScalarType> case_dtypes() { return {at::kLong, at::kBFloat16, at::kFloat, at::kDouble}; }

inline std::vector<Tensor> empty_like(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(at::full_like(tensor, 99));
  return result;
}

inline std::vector<Tensor> all_to_all_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (const at::ScalarType dtype : case_dtypes()) {
    std::vector<Tensor> send, want;
    for (int p = 0; p < comm.size(); ++p) {
      send.push_back(message(comm.rank(), p, dtype));
      want.push_back(message(p, comm.rank(), dtype));
    }
    const std::vector<Tensor> receive = empty_like(want);
    comm.all_to_all(send, receive, "case").wait();
    for (int p = 0; p < comm.size(); ++p) expect_equal(receive[p], want[p], fmt::format("from rank {}", p));
    results.insert(results.end(), receive.begin(), receive.end());
  }
  return results;
}

inline std::vector<Tensor> all_gather_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (const at::ScalarType dtype : case_dtypes()) {
    std::vector<Tensor> want;
    for (int p = 0; p < comm.size(); ++p) want.push_back(message(p, 0, dtype));
    const std::vector<Tensor> receive = empty_like(want);
    comm.all_gather(want[comm.rank()], receive, "case").wait();
    for (int p = 0; p < comm.size(); ++p) expect_equal(receive[p], want[p], fmt::format("from rank {}", p));
    results.insert(results.end(), receive.begin(), receive.end());
  }
  return results;
}

// Values whose sum depends on its order in every dtype but int64.
inline Tensor summand(at::IntArrayRef shape, int from, int to, at::ScalarType dtype) {
  if (dtype == at::kLong) return coded(shape, from * 64 + to, dtype);
  return (seeded_normal(shape, 1.0, 5, fmt::format("{}-{}", from, to), at::kDouble) * (1 + 100 * (from % 3))).to(dtype);
}

inline Tensor sum_in_order(at::IntArrayRef shape, int ranks, int to, at::ScalarType dtype) {
  const bool narrow = dtype == at::kBFloat16;
  Tensor sum = summand(shape, 0, to, dtype).to(narrow ? at::kFloat : dtype);
  for (int p = 1; p < ranks; ++p) sum = sum + summand(shape, p, to, dtype).to(sum.scalar_type());
  return sum.to(dtype);
}

inline std::vector<Tensor> reduce_scatter_case(Communicator& comm) {
  std::vector<Tensor> results;
  const auto shape = [](int p) { return std::vector<int64_t>{(p * 3) % 5, 17}; };
  for (const at::ScalarType dtype : case_dtypes()) {
    std::vector<Tensor> parts;
    for (int p = 0; p < comm.size(); ++p) parts.push_back(summand(shape(p), comm.rank(), p, dtype));
    const Tensor own = parts[comm.rank()].clone();
    const Tensor sum = at::empty_like(own);
    comm.reduce_scatter(parts, sum, "case").wait();
    expect_equal(sum, sum_in_order(shape(comm.rank()), comm.size(), comm.rank(), dtype), "sum");
    expect_equal(parts[comm.rank()], own, "own part");
    results.push_back(sum);
  }
  return results;
}

inline std::vector<Tensor> all_reduce_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (const at::ScalarType dtype : case_dtypes()) {
    for (const int64_t count : {0, 1, 5, 1000}) {
      const Tensor tensor = summand({count}, comm.rank(), 0, dtype);
      comm.all_reduce(tensor, "case").wait();
      expect_equal(tensor, sum_in_order({count}, comm.size(), 0, dtype), fmt::format("{} elements", count));
      results.push_back(tensor);
    }
  }
  return results;
}

inline std::vector<Tensor> send_recv_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (int hop = 0; hop < comm.size(); ++hop) {
    const int to = (comm.rank() + hop) % comm.size(), from = (comm.rank() + comm.size() - hop) % comm.size();
    const Tensor received = at::zeros({5 + from % 3});
    comm.send_recv(coded({5 + comm.rank() % 3}, comm.rank()), to, received, from, "case").wait();
    expect_equal(received, coded({5 + from % 3}, from), fmt::format("hop {}", hop));
    results.push_back(received);
  }
  return results;
}

inline std::vector<Tensor> broadcast_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (int root = 0; root < comm.size(); ++root) {
    const Tensor tensor = coded({11}, comm.rank());
    comm.broadcast(tensor, root, "case").wait();
    expect_equal(tensor, coded({11}, root), fmt::format("root {}", root));
    results.push_back(tensor);
  }
  return results;
}

inline std::vector<Tensor> numbers_case(Communicator& comm) {
  comm.barrier("case");
  const double largest = comm.max_over_ranks(-1.0 - comm.rank(), "case");
  const double sum = comm.sum_over_ranks(0.5 + comm.rank(), "case");
  PARLAT_ASSERT(largest == -1, "max {}", largest);
  PARLAT_ASSERT(sum == comm.size() * comm.size() / 2.0, "sum {}", sum);
  return {};
}

// Several exchanges under way at once, waited for in the order that is not theirs, and large enough that MPI cannot
// buffer them.
inline std::vector<Tensor> overlapping_case(Communicator& comm) {
  const int64_t count = 100'000;
  std::vector<std::vector<Tensor>> received;
  std::vector<Handle> handles;
  for (int64_t i = 0; i < 3; ++i) {
    std::vector<Tensor> receive;
    for (int p = 0; p < comm.size(); ++p) receive.push_back(at::zeros({count}));
    handles.push_back(comm.all_gather(coded({count}, comm.rank() + 10 * i), receive, fmt::format("case {}", i)));
    received.push_back(receive);
  }
  for (int i = 2; i >= 0; --i) {
    handles[i].wait();
    for (int p = 0; p < comm.size(); ++p) expect_equal(received[i][p], coded({count}, p + 10 * i), "gathered");
  }
  return received[2];
}

// A mesh of columns (rank / 2) and rows (rank % 2); groups exchange at the same time.
inline std::vector<Tensor> split_case(Communicator& comm) {
  const auto row = comm.split(comm.rank() % 2), column = comm.split(comm.rank() / 2);
  const auto alone = row->split(row->rank());
  PARLAT_ASSERT(alone->size() == 1 && column->size() <= 2, "sizes {} and {}", alone->size(), column->size());
  std::vector<Tensor> results;
  for (Communicator* group : {row.get(), column.get(), alone.get()}) {
    const Tensor all = at::zeros({group->size()}, at::kLong);
    group->all_gather(at::full({1}, comm.rank(), at::kLong), all.split(1), "case").wait();
    results.push_back(all);
  }
  expect_equal(results[0], at::arange(comm.rank() % 2, comm.size(), 2, at::kLong), "row");
  const int first = comm.rank() / 2 * 2;
  expect_equal(results[1], at::arange(first, std::min(first + 2, comm.size()), at::kLong), "column");
  return results;
}

inline std::vector<SequenceShards> case_shards(int64_t sequence, int ranks) {
  return {SequenceShards::contiguous(sequence, ranks), SequenceShards::zigzag(sequence, ranks)};
}

inline Tensor local_of(const Tensor& whole, const SequenceShards& shards, int rank) {
  return whole.index_select(1, shard_indices(shards, rank));
}

// Both head exchanges, forward and backward: each is a permutation, so that the values are known exactly. Gradients
// come in non-contiguous, sequences and heads don't divide by the ranks, ranks may be without tokens or heads.
inline std::vector<Tensor> heads_case(Communicator& comm) {
  std::vector<Tensor> results;
  const int rank = comm.rank();
  const HeadShards heads(7, comm.size());
  const Range mine = heads.range(rank);
  for (const auto& [batch, sequence] : {std::pair{2, 13}, {1, 29}, {2, 3}}) {
    for (const SequenceShards& shards : case_shards(sequence, comm.size())) {
      const Tensor x = coded({batch, sequence, 7, 5}, 1), g = coded({batch, sequence, 7, 5}, 2);
      const Tensor x_local = local_of(x, shards, rank), g_local = local_of(g, shards, rank);
      const Tensor x_mine = x.narrow(2, mine.begin, mine.size()), g_mine = g.narrow(2, mine.begin, mine.size());

      Tensor leaf = x_local.transpose(2, 3).contiguous().transpose(2, 3).detach().requires_grad_();
      Tensor y = scatter_heads_gather_sequence(leaf, heads, shards, comm, "case");
      expect_equal(y, x_mine, "whole sequence, own heads");
      y.backward(g_mine);
      expect_equal(leaf.grad(), g_local, "its gradient");
      results.insert(results.end(), {y.detach(), leaf.grad()});

      leaf = x_mine.detach().requires_grad_();
      y = scatter_sequence_gather_heads(leaf, heads, shards, comm, "case");
      expect_equal(y, x_local, "own tokens, all heads");
      y.backward(g_local.transpose(1, 2).contiguous().transpose(1, 2));
      expect_equal(leaf.grad(), g_mine, "its gradient");
      results.insert(results.end(), {y.detach(), leaf.grad()});
    }
  }
  return results;
}

inline std::vector<Tensor> gather_case(Communicator& comm) {
  std::vector<Tensor> results;
  for (const auto& [batch, sequence] : {std::pair{2, 13}, {1, 29}, {1, 3}}) {
    for (const SequenceShards& shards : case_shards(sequence, comm.size())) {
      const Tensor x = coded({batch, sequence, 5}, 3);
      Tensor leaf = local_of(x, shards, comm.rank()).requires_grad_();
      PendingGather pending = gather_sequence_async(leaf * 1, shards, comm, "case");
      const Tensor y = pending.wait();
      expect_equal(y, x, "gathered");
      y.backward(coded({batch, 5, sequence}, comm.rank()).transpose(1, 2));
      Tensor want = at::zeros({batch, sequence, 5});
      for (int p = 0; p < comm.size(); ++p) want += coded({batch, 5, sequence}, p).transpose(1, 2);
      expect_equal(leaf.grad(), local_of(want, shards, comm.rank()), "its gradient");
      results.insert(results.end(), {y.detach(), leaf.grad()});
    }
  }
  return results;
}

inline std::vector<Tensor> rows_case(Communicator& comm) {
  std::vector<Tensor> sends, wants, grads, want_grads;
  std::vector<int64_t> send_counts, receive_counts;
  for (int p = 0; p < comm.size(); ++p) {
    sends.push_back(message(comm.rank(), p, at::kFloat));
    wants.push_back(message(p, comm.rank(), at::kFloat));
    send_counts.push_back(sends.back().size(0));
    receive_counts.push_back(wants.back().size(0));
    grads.push_back(wants.back() * 2);
    want_grads.push_back(sends.back() * 2);
  }
  const Tensor leaf = at::cat(sends).requires_grad_();
  const Tensor y = exchange_rows(leaf, send_counts, receive_counts, comm, "case");
  if (comm.size() > 1) expect_equal(y, at::cat(wants), "rows");
  y.backward(at::cat(grads).t().contiguous().t());
  expect_equal(leaf.grad(), at::cat(want_grads), "gradients of rows");
  return {y.detach(), leaf.grad()};
}

// The counters of every collective against its closed form.
inline std::vector<Tensor> traffic_case(Communicator& comm) {
  const int64_t others = comm.size() - 1;
  const auto expect_sent = [&](Collective kind, int64_t bytes, const auto& call) {
    const Traffic before = comm.traffic();
    call();
    const Traffic sent = comm.traffic() - before;
    const Traffic::Entry& entry = sent[kind];
    PARLAT_ASSERT(entry.bytes == bytes && sent.bytes() == bytes && entry.calls == 1,
                  "{}: {} bytes, {} of them by others, in {} calls, want {}", name(kind), sent.bytes(),
                  sent.bytes() - entry.bytes, entry.calls, bytes);
    return entry;
  };
  const auto tensors = [&](int64_t count) {
    std::vector<Tensor> result;
    for (int p = 0; p < comm.size(); ++p) result.push_back(at::zeros({count}, at::kBFloat16));
    return result;
  };
  const Tensor ten = at::zeros({10}, at::kBFloat16), hundred = at::zeros({100}, at::kBFloat16);
  const int64_t share = even_share(100, comm.size(), comm.rank()).size();
  const int next = (comm.rank() + 1) % comm.size(), last = (comm.rank() + comm.size() - 1) % comm.size();

  auto entry = expect_sent(Collective::kAllToAll, 20 * others,
                           [&] { comm.all_to_all(tensors(10), tensors(10), "case").wait(); });
  PARLAT_ASSERT(entry.elements == 10 * others, "{} elements", entry.elements);
  entry = expect_sent(Collective::kAllGather, 20 * others, [&] { comm.all_gather(ten, tensors(10), "case").wait(); });
  PARLAT_ASSERT(entry.shard_elements == (others > 0 ? 10 : 0), "{} elements", entry.shard_elements);
  expect_sent(Collective::kReduceScatter, 20 * others, [&] { comm.reduce_scatter(tensors(10), ten, "case").wait(); });
  expect_sent(Collective::kAllReduce, 2 * (100 - share) + 2 * share * others,
              [&] { comm.all_reduce(hundred, "case").wait(); });
  expect_sent(Collective::kSendRecv, others > 0 ? 20 : 0,
              [&] { comm.send_recv(ten, next, ten.clone(), last, "case").wait(); });
  expect_sent(Collective::kBroadcast, comm.rank() == 0 ? 20 * others : 0,
              [&] { comm.broadcast(ten, 0, "case").wait(); });
  expect_sent(Collective::kBarrier, 0, [&] { comm.barrier("case"); });
  expect_sent(Collective::kAllReduce, 8 * others, [&] { comm.max_over_ranks(1, "case"); });

  const Traffic before = comm.traffic();
  const auto group = comm.split(0);
  PARLAT_ASSERT((comm.traffic() - before).bytes() == 0, "a split counts {} bytes", (comm.traffic() - before).bytes());
  expect_sent(Collective::kAllGather, 20 * others, [&] { group->all_gather(ten, tensors(10), "case").wait(); });
  return {};
}

inline const std::vector<CommCase>& all_comm_cases() {
  static const std::vector<CommCase> cases = {
      {"all_to_all", all_to_all_case},   {"all_gather", all_gather_case}, {"reduce_scatter", reduce_scatter_case},
      {"all_reduce", all_reduce_case},   {"send_recv", send_recv_case},   {"broadcast", broadcast_case},
      {"numbers", numbers_case},         {"split", split_case},           {"heads", heads_case},
      {"overlapping", overlapping_case}, {"gather", gather_case},         {"rows", rows_case},
      {"traffic", traffic_case},
  };
  return cases;
}

}  // namespace parlat
