# Warnings are on for our targets alone; CMAKE_COMPILE_WARNING_AS_ERROR (set in CI) makes them errors.
function(deltaic_warnings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor>
                                           $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(NOT "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "90a-real")  # what Hopper's kernels alone use is unused elsewhere
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=177>)
  endif()
endfunction()
