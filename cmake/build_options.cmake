# The build options that users of this family of libraries know, each with what it does here.
#
# One table for CMake, for `mori info` (build_options.json in the package) and for docs/build-options.md
# (tools/build_options.py prints it). An option is taken from -D, else from an environment variable of its name.
#
#   mori_option(NAME DEFAULT WHEN "what it does here, and why")    WHEN: build | run | never

function(mori_option name default when meaning)
  if(DEFINED ${name})
    set(given "${${name}}")
  elseif(DEFINED ENV{${name}})
    set(given "$ENV{${name}}")
  endif()
  if(DEFINED given AND NOT given STREQUAL "")
    if(NOT given MATCHES "^(1|0|[Oo][Nn]|[Oo][Ff][Ff]|[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|[Yy][Ee][Ss]|[Nn][Oo])$")
      message(FATAL_ERROR "${name}=${given} is not valid: expected ON or OFF")
    endif()
    if(given)
      set(value ON)
    else()
      set(value OFF)
    endif()
    if(NOT when STREQUAL "build")
      message(NOTICE "mori: ${name}=${value} changes nothing in this build. ${meaning}")
    endif()
    set(MORI_OPTIONS_GIVEN_JSON "${MORI_OPTIONS_GIVEN_JSON}\"${name}\": \"${value}\", " PARENT_SCOPE)
  else()
    set(value ${default})
  endif()
  set(OPTION_${name} ${value} PARENT_SCOPE)
endfunction()

mori_option(BUILD_OPS ON never "The EP ops are always built: they are one extension with the rest.")
mori_option(BUILD_SHMEM ON never "Symmetric memory is always built: the ops stand on it.")
mori_option(BUILD_IO ON never "MORI-IO is out of scope of this package; importing mori.io says so.")
mori_option(BUILD_PYBINDS ON never "The Python extension is the only thing that is built.")
mori_option(ENABLE_PROFILER OFF run "Device code is compiled on demand: set the variable when the program runs.")
mori_option(ENABLE_STANDARD_MOE_ADAPT ON run "These methods need no build of their own; OFF when the program runs refuses them.")
mori_option(ENABLE_DEBUG_PRINTF OFF never "No kernel prints; faults are reported as exceptions that name rank and phase.")
mori_option(USE_ROCM ON never "One wheel serves every target; the extension links neither ROCm nor CUDA.")
mori_option(USE_BNXT OFF never "Network adapters are reached through UCX, which is loaded when the program runs.")
mori_option(USE_IONIC OFF never "Network adapters are reached through UCX, which is loaded when the program runs.")
mori_option(MORI_WERROR OFF build "Compiler warnings are errors; make builds with it.")
mori_option(MORI_HOST_SIMD ON build "Also build the AVX2 and AVX-512 variants of the host kernels (x86-64 only).")

string(REGEX REPLACE ", $" "" MORI_OPTIONS_GIVEN_JSON "${MORI_OPTIONS_GIVEN_JSON}")
