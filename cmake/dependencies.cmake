# Everything parlat is built from. All but torch are Debian packages (scripts/build lists them); torch is the wheel of
# the Python that PARLAT_PYTHON names.
set(PARLAT_PYTHON ${CMAKE_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "the Python whose torch is used")
include(torch)

find_package(fmt REQUIRED)
# The torch wheel has headers of another fmt, which would win wherever torch is included: the library's come first.
find_path(fmt_headers fmt/format.h REQUIRED)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/first)
file(CREATE_LINK ${fmt_headers}/fmt ${CMAKE_BINARY_DIR}/first/fmt SYMBOLIC)
include_directories(BEFORE ${CMAKE_BINARY_DIR}/first)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(GTest REQUIRED)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(hwy REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(MPI COMPONENTS CXX)
# OpenMPI's deprecated C++ bindings are never used.
add_compile_definitions(OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

# None of them has a CMake package in Debian 12.
function(find_plain_library target header library)
  find_path(${target}_INCLUDE_DIR ${header} REQUIRED)
  find_library(${target}_LIBRARY ${library} REQUIRED)
  add_library(${target} UNKNOWN IMPORTED)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${${target}_LIBRARY}
                                             INTERFACE_INCLUDE_DIRECTORIES ${${target}_INCLUDE_DIR})
endfunction()
find_plain_library(pcre2 pcre2.h pcre2-8)
find_plain_library(utf8proc utf8proc.h utf8proc)
find_plain_library(xxhash xxhash.h xxhash)
# Of oneDNN the library alone: torch brings headers of another one.
find_library(dnnl_LIBRARY dnnl REQUIRED)
