# Writes shipped_machines.h: the descriptions in machines/, by name, for parlat/plan/machine.cc.
file(GLOB machines CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/machines/*.toml)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${machines})
set(shipped "#include <array>\n#include <string_view>\n#include <utility>\n\n")
list(LENGTH machines count)
string(APPEND shipped "constexpr std::array<std::pair<std::string_view, std::string_view>, ${count}> "
                      "kShippedMachines = {{\n")
foreach(machine ${machines})
  get_filename_component(name ${machine} NAME_WE)
  file(READ ${machine} text)
  string(APPEND shipped "{\"${name}\", R\"toml(${text})toml\"},\n")
endforeach()
string(APPEND shipped "}};\n")
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/shipped_machines.h CONTENT "${shipped}" @ONLY)
