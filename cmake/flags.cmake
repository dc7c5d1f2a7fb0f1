# Compiler flags, as interface targets: flashhopper_host_flags (g++ with CUTLASS), flashhopper_cuda_flags (nvcc).
# cmake/toolchain.cmake adds the include directories that it finds.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

set(FLASHHOPPER_WARNINGS -Wall -Wextra $<$<BOOL:${FLASHHOPPER_WERROR}>:-Werror>)

add_library(flashhopper_host_flags INTERFACE)
target_include_directories(flashhopper_host_flags INTERFACE
  "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_SOURCE_DIR}/cpp")
target_compile_options(flashhopper_host_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${FLASHHOPPER_WARNINGS}>)

# CuTe offers wgmma widths that are not powers of two (80, 112, 160) only on request.
target_compile_definitions(flashhopper_host_flags INTERFACE CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)

add_library(flashhopper_cuda_flags INTERFACE)
target_link_libraries(flashhopper_cuda_flags INTERFACE flashhopper_host_flags)
# sm_90a alone: wgmma and setmaxnreg exist nowhere else and have no forward-compatible PTX.
# No --use_fast_math: kernels name the fast instructions they want.
target_compile_options(flashhopper_cuda_flags INTERFACE
  -gencode=arch=compute_90a,code=sm_90a
  --expt-relaxed-constexpr
  -lineinfo
  -Xptxas=-v
  -Xcompiler=-Wall,-Wno-unknown-pragmas)  # `#pragma unroll` means nothing to g++
