// Takes the place of mpi.cc in a build without MPI.
#include "parlat/base/error.h"
#include "parlat/comm/communicator.h"

namespace parlat {

std::unique_ptr<Communicator> make_mpi_communicator(CommOptions) {
  throw ConfigError("ranks: mpi was asked for, but this build has no MPI (install libopenmpi-dev and build again)");
}

void finalize_mpi() {}

}  // namespace parlat
