# The CPU kernels are compiled once an instruction set and chosen at run time.
