# CUDA compiler, CUTLASS headers, ccache and the job pool. The lookup itself is _build_backend/toolchain.py, which the
# packaging uses too; -DCMAKE_CUDA_COMPILER and -DCUTLASS_DIR overrule it.
# Sets FLASHHOPPER_CUDA_LAUNCHER and the pool `cuda`; adds the include directories to flashhopper_host_flags.

function(flashhopper_find what variable)
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/_build_backend/toolchain.py" ${what}
    OUTPUT_VARIABLE found ERROR_VARIABLE error RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(status)
    message(FATAL_ERROR "${error}")
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

if(NOT CMAKE_CUDA_COMPILER)
  flashhopper_find(nvcc nvcc)
  set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "nvcc")
endif()
# The toolkit of the wheels has lib/ where its nvcc.profile says lib64/.
get_filename_component(toolkit "${CMAKE_CUDA_COMPILER}/../.." REALPATH)
if(EXISTS "${toolkit}/lib/libcudart_static.a" AND NOT EXISTS "${toolkit}/lib64")
  set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
endif()
# Without an architecture CMake would test the compiler with one that a newer toolkit may have dropped.
set(CMAKE_CUDA_ARCHITECTURES 90a)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, flashhopper needs CUDA 12.8 or newer")
endif()

if(NOT CUTLASS_DIR)
  flashhopper_find(cutlass CUTLASS_DIR)
endif()

target_include_directories(flashhopper_host_flags SYSTEM INTERFACE "${CUTLASS_DIR}/include")
# nvcc knows these by itself, host compilers do not; libcu++ moved into cccl/ with CUDA 13.
foreach(directory IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
  target_include_directories(flashhopper_host_flags SYSTEM INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${directory}>")
  if(EXISTS "${directory}/cccl" AND NOT "${directory}/cccl" IN_LIST CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
    target_include_directories(flashhopper_host_flags SYSTEM INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${directory}/cccl>")
  endif()
endforeach()

find_program(CCACHE_PROGRAM ccache)
set(FLASHHOPPER_CUDA_LAUNCHER sh "${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_log.sh")
if(CCACHE_PROGRAM)
  list(APPEND FLASHHOPPER_CUDA_LAUNCHER "${CCACHE_PROGRAM}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

# One nvcc of these kernels takes up to 5 GB: as many as fit the memory free now, at least one, at most one a core.
if(NOT FLASHHOPPER_CUDA_JOBS)
  cmake_host_system_information(RESULT megabytes QUERY AVAILABLE_PHYSICAL_MEMORY)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  math(EXPR jobs "${megabytes} / 5000")
  if(jobs GREATER cores)
    set(jobs ${cores})
  elseif(jobs LESS 1)
    set(jobs 1)
  endif()
  set(FLASHHOPPER_CUDA_JOBS ${jobs} CACHE STRING "CUDA compiles at a time")
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=${FLASHHOPPER_CUDA_JOBS})
message(STATUS "nvcc ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, ${FLASHHOPPER_CUDA_JOBS} at a time; "
  "CUTLASS ${CUTLASS_DIR}; ccache ${CCACHE_PROGRAM}")
