// What the MPI tests run, alone or under mpirun: mpi_driver local:N | mpi, then
//   digests         every case of tests/comm/cases.h; rank 0 prints a digest of each rank's results
//   throw | late    rank 1 throws, or never arrives at an exchange
//   kill            rank 1 dies of SIGKILL
//   order           rank 1 issues another exchange than the others
//   short | long    rank 0 sends less, or more, than rank 1 expects
//   none | extra    rank 0 sends nothing that rank 1 expects, or something that it does not
//   overlap         rank 1 starts an exchange and computes for 4 s; rank 0 prints for how many ms it waited
//   shapes          ranks exchange tensors without values
//   pace COUNT      milliseconds of one all_reduce of COUNT floats, for measurements by hand
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "tests/comm/cases.h"

namespace parlat {
namespace {

uint64_t digest(const std::vector<Tensor>& tensors) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (const Tensor& tensor : tensors) {
    const Tensor bytes = tensor.contiguous();
    const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211u;
  }
  return hash;
}

void print_digests(Communicator& comm) {
  for (const CommCase& test : all_comm_cases()) {
    const auto own = static_cast<int64_t>(digest(test.run(comm)));
    const Tensor all = at::zeros({comm.size()}, at::kLong);
    comm.all_gather(at::full({1}, own, at::kLong), all.split(1), "digests").wait();
    for (int p = 0; p < comm.size() && comm.rank() == 0; ++p) {
      std::printf("%s rank %d %016lx\n", test.name, p, static_cast<uint64_t>(all[p].item<int64_t>()));
    }
  }
  if (comm.rank() == 0) std::printf("bytes sent by rank 0: %ld\n", static_cast<long>(comm.traffic().bytes()));
}

void fail_as(const std::string& mode, Communicator& comm) {
  comm.barrier("start");
  if (comm.rank() == 1) {
    if (mode == "throw") throw DataError("novel.txt: broken");
    if (mode == "kill") kill(getpid(), SIGKILL);
    if (mode == "late") std::this_thread::sleep_for(std::chrono::seconds(5));
  }
  if (mode == "short" || mode == "long") {
    const int64_t other = mode == "short" ? 5 : 3;
    return comm.broadcast(at::ones({comm.rank() == 1 ? other : 4}), 0, "weights").wait();
  }
  if (mode == "none" || mode == "extra") {
    std::vector<Tensor> send(comm.size(), at::ones({0})), receive = send;
    if (comm.rank() == 0) send[1] = at::ones({mode == "none" ? 0 : 4});
    if (comm.rank() == 1) receive[0] = at::ones({mode == "none" ? 4 : 0});
    comm.all_to_all(send, receive, "rows").wait();
    return comm.barrier("end");
  }
  if (mode == "shapes") return comm.all_reduce(at::ones({4}, at::kMeta), "weights").wait();
  // Large enough that unfinished transfers are under way when the failure comes.
  const char* what = mode == "order" && comm.rank() == 1 ? "laga latent" : "laga query";
  for (int i = 0; i < 3; ++i) comm.all_reduce(at::ones({1'000'000}), what).wait();
}

void pace(Communicator& comm, int64_t count) {
  const Tensor tensor = at::ones({count});
  const int repetitions = 100;
  comm.barrier("start");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repetitions; ++i) comm.all_reduce(tensor, "pace").wait();
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  if (comm.rank() == 0) std::printf("%.4f ms\n", spent.count() / repetitions);
}

void overlap(Communicator& comm) {
  const Tensor send = at::ones({8'000'000}), receive = at::empty_like(send);  // far beyond any buffer on the way
  comm.barrier("start");
  const auto start = std::chrono::steady_clock::now();
  const auto milliseconds = [&] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  Handle exchange = comm.send_recv(send, 1 - comm.rank(), receive, 1 - comm.rank(), "latents");
  while (comm.rank() == 1 && milliseconds() < 4000) continue;
  exchange.wait();
  if (comm.rank() == 0) std::printf("%.0f\n", milliseconds());
}

int run(const std::string& ranks, const std::string& mode, int64_t count) {
  const auto body = [&](Communicator& comm) {
    if (mode == "digests") return print_digests(comm);
    if (mode == "overlap") return overlap(comm);
    if (mode == "pace") return pace(comm, count);
    fail_as(mode, comm);
  };
  const CommOptions options{.timeout = std::chrono::seconds(mode == "late" || mode == "order" ? 2 : 60)};
  int code = 0;
  try {
    if (ranks == "mpi") {
      run_mpi_rank(body, 1, options);
    } else {
      run_local_ranks(std::stoi(ranks.substr(ranks.find(':') + 1)), body, 1, options);
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "parlat: error: %s\n", error.what());
    code = error.exit_code();
  }
  finalize_mpi();
  return code;
}

}  // namespace
}  // namespace parlat

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  return parlat::run(argv[1], argv[2], argc > 3 ? std::atol(argv[3]) : 0);
}
