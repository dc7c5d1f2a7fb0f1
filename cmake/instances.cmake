# One .cu for every (row of a config table, element type). The table in C++ is the only list: its rows are read here.
# A row is one line of the form  {.name = "fwd_hd128_m128_n160", .head_dim = 128, ...

# flashhopper_generate_instances(<out> TEMPLATE <file.cu.in> TABLE <config.hpp> LIST <name.inc> [DTYPES <element>...]):
# the generated files, in the build directory, named <row>_<element>.cu; the template sees FLASHHOPPER_CONFIG and
# FLASHHOPPER_ELEMENT. DTYPES: FLASHHOPPER_DTYPES unless said.
# generated/<name.inc> says what the dispatch file of this table may call: FLASHHOPPER_INSTANCE(row, element) for every
# generated file. Both may be empty in a build that FLASHHOPPER_HEAD_DIMS narrows.
function(flashhopper_generate_instances out)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "TEMPLATE;TABLE;LIST" "DTYPES")
  if(NOT ARG_DTYPES)
    set(ARG_DTYPES ${FLASHHOPPER_DTYPES})
  endif()
  set(table "${PROJECT_SOURCE_DIR}/${ARG_TABLE}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${table}")
  file(STRINGS "${table}" rows REGEX "{ *\\.name = \"[a-z0-9_]+\"")
  if(NOT rows)
    message(FATAL_ERROR "${ARG_TABLE}: no row that begins with {.name = ")
  endif()

  set(instances)
  set(lines "// Written by cmake/instances.cmake: the kernels in this build.\n")
  foreach(row IN LISTS rows)
    if(NOT row MATCHES "\\.name = \"([a-z0-9_]+)\".*\\.head_dim = ([0-9]+)")
      message(FATAL_ERROR "${ARG_TABLE}: no .name and .head_dim on one line: ${row}")
    endif()
    set(FLASHHOPPER_CONFIG "${CMAKE_MATCH_1}")
    if(FLASHHOPPER_HEAD_DIMS AND NOT CMAKE_MATCH_2 IN_LIST FLASHHOPPER_HEAD_DIMS)
      continue()
    endif()
    foreach(FLASHHOPPER_ELEMENT IN LISTS ARG_DTYPES)
      set(instance "${PROJECT_BINARY_DIR}/instances/${FLASHHOPPER_CONFIG}_${FLASHHOPPER_ELEMENT}.cu")
      configure_file("${PROJECT_SOURCE_DIR}/${ARG_TEMPLATE}" "${instance}" @ONLY)
      list(APPEND instances "${instance}")
      string(APPEND lines "FLASHHOPPER_INSTANCE(${FLASHHOPPER_CONFIG}, ${FLASHHOPPER_ELEMENT})\n")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/generated/${ARG_LIST}" CONTENT "${lines}" @ONLY)
  set(${out} "${instances}" PARENT_SCOPE)
endfunction()

# flashhopper_generate_quantizer(<out>): one .cu for each element type, quantize_<element>.cu, with the kernels of every
# computed head dimension that FLASHHOPPER_HEAD_DIMS keeps, and generated/flashhopper_quantize_instances.inc, the same
# list for quantize_dispatch.cpp. They are small: together they compile faster than apart.
function(flashhopper_generate_quantizer out)
  set(instances)
  set(lines "// Written by cmake/instances.cmake: the quantiser's kernels in this build.\n")
  foreach(FLASHHOPPER_ELEMENT IN LISTS FLASHHOPPER_DTYPES)
    set(FLASHHOPPER_QUANTIZE_KERNELS "")
    string(APPEND lines "FLASHHOPPER_MEANS(${FLASHHOPPER_ELEMENT})\n")
    foreach(head_dim 64 96 128 192 256)
      if(NOT FLASHHOPPER_HEAD_DIMS OR head_dim IN_LIST FLASHHOPPER_HEAD_DIMS)
        string(APPEND FLASHHOPPER_QUANTIZE_KERNELS "FLASHHOPPER_ROWS(${head_dim})\n")
        string(APPEND lines "FLASHHOPPER_ROWS(${head_dim}, ${FLASHHOPPER_ELEMENT})\n")
      endif()
      # Rows of 192 columns may come with values of 128.
      if(NOT FLASHHOPPER_HEAD_DIMS OR head_dim IN_LIST FLASHHOPPER_HEAD_DIMS
          OR (head_dim EQUAL 128 AND 192 IN_LIST FLASHHOPPER_HEAD_DIMS))
        string(APPEND FLASHHOPPER_QUANTIZE_KERNELS "FLASHHOPPER_VALUES(${head_dim})\n")
        string(APPEND lines "FLASHHOPPER_VALUES(${head_dim}, ${FLASHHOPPER_ELEMENT})\n")
      endif()
    endforeach()
    set(instance "${PROJECT_BINARY_DIR}/instances/quantize_${FLASHHOPPER_ELEMENT}.cu")
    configure_file("${PROJECT_SOURCE_DIR}/cpp/src/quantize_instance.cu.in" "${instance}" @ONLY)
    list(APPEND instances "${instance}")
  endforeach()
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/generated/flashhopper_quantize_instances.inc" CONTENT "${lines}" @ONLY)
  set(${out} "${instances}" PARENT_SCOPE)
endfunction()
