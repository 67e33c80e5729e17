# Everything parlat is built from. All but torch are Debian packages (scripts/build lists them); torch is the wheel of
# the Python that PARLAT_PYTHON names.
set(PARLAT_PYTHON ${CMAKE_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "the Python whose torch is used")
include(torch)

# The wheel brings the headers of its own fmt and they win where torch is included, so fmt is used header-only; spdlog,
# compiled against the system's fmt, stays behind parlat/base/log.h.
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(GTest REQUIRED)
find_package(Threads REQUIRED)
find_package(MPI COMPONENTS CXX)
# OpenMPI's deprecated C++ bindings are never used.
add_compile_definitions(OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
