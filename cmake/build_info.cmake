# Writes OUTPUT with the version and the commit of SOURCE_DIR (-dirty where files differ from it), if that is not what it
# says already. Run by every build.
execute_process(COMMAND git describe --always --dirty --abbrev=12 WORKING_DIRECTORY ${SOURCE_DIR}
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE no_git)
if(no_git)
  set(commit unknown)
endif()
file(WRITE ${OUTPUT}.new "#define PARLAT_VERSION \"${VERSION}\"\n#define PARLAT_COMMIT \"${commit}\"\n")
execute_process(COMMAND ${CMAKE_COMMAND} -E copy_if_different ${OUTPUT}.new ${OUTPUT})
