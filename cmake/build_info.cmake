# Writes OUTPUT with the version and the commit of SOURCE_DIR; run at build time, when HEAD moved.
execute_process(COMMAND git describe --always --abbrev=12 WORKING_DIRECTORY ${SOURCE_DIR}
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE no_git)
if(no_git)
  set(commit unknown)
endif()
file(WRITE ${OUTPUT} "#define PARLAT_VERSION \"${VERSION}\"\n#define PARLAT_COMMIT \"${commit}\"\n")
