include(${ROOT}/cmake/build_options.cmake)
message(NOTICE "given: {${MORI_OPTIONS_GIVEN_JSON}}")
message(NOTICE "simd: ${OPTION_MORI_HOST_SIMD} werror: ${OPTION_MORI_WERROR}")
