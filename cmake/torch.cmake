# The target `torch`: headers and CPU libraries of the torch wheel that PARLAT_PYTHON has. The wheel's own
# TorchConfig.cmake is not used: it warns of a library (kineto) that no wheel ships, and that of a CUDA wheel demands
# the CUDA toolkit, which nothing here needs. Sets TORCH_VERSION.
execute_process(
  COMMAND ${PARLAT_PYTHON} -c "import importlib.metadata as m, importlib.util as u
print(m.version('torch'), u.find_spec('torch').submodule_search_locations[0], sep=';', end='')"
  OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  message(FATAL_ERROR "no torch in ${PARLAT_PYTHON}; run ./scripts/build, which installs it")
endif()
list(GET found 0 TORCH_VERSION)
list(GET found 1 torch_dir)
if(TORCH_VERSION VERSION_LESS 2.13)
  message(FATAL_ERROR "${PARLAT_PYTHON}: expected torch 2.13 or newer, got ${TORCH_VERSION}")
endif()

add_library(c10 SHARED IMPORTED)
set_target_properties(c10 PROPERTIES IMPORTED_LOCATION ${torch_dir}/lib/libc10.so)
add_library(torch SHARED IMPORTED)
set_target_properties(torch PROPERTIES
  IMPORTED_LOCATION ${torch_dir}/lib/libtorch_cpu.so
  INTERFACE_LINK_LIBRARIES c10
  INTERFACE_INCLUDE_DIRECTORIES "${torch_dir}/include;${torch_dir}/include/torch/csrc/api/include"
  # What the wheel was compiled with; the c10d headers declare their classes only then.
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE")
