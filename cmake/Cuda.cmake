# Decides whether the CUDA backend is built (DELTAIC_WITH_CUDA) and how.
if(DELTAIC_CUDA STREQUAL "AUTO" OR DELTAIC_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    # sm_90a: wgmma and setmaxnreg exist in the "a" target alone. Release wheels pass the full list,
    # 80-real;89-real;90a-real;100f-real;120.
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
endif()

if(DELTAIC_CUDA STREQUAL "AUTO")
  if(CMAKE_CUDA_COMPILER)
    set(DELTAIC_WITH_CUDA ON)
  else()
    set(DELTAIC_WITH_CUDA OFF)
  endif()
elseif(DELTAIC_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "DELTAIC_CUDA=ON, but no nvcc was found. Put it on PATH, set CUDACXX, or build with DELTAIC_CUDA=OFF.")
  endif()
  set(DELTAIC_WITH_CUDA ON)
else()
  set(DELTAIC_WITH_CUDA OFF)
endif()
message(STATUS "deltaic: CUDA backend ${DELTAIC_WITH_CUDA}")

if(DELTAIC_WITH_CUDA)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

function(deltaic_add_cuda target)
  target_sources(${target} PRIVATE ${ARGN})
  target_compile_features(${target} PRIVATE cuda_std_20)  # cxx_std_20 says nothing to nvcc
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  target_compile_definitions(${target} PRIVATE DELTAIC_WITH_CUDA)
endfunction()
