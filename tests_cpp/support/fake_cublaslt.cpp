// A libcublasLt by its names alone: cublasLtCreate returns 13, the others do nothing.
#define ENTRY(name) \
  extern "C" int name() { return 0; }

extern "C" int cublasLtCreate(void**) { return 13; }
ENTRY(cublasLtDestroy)
ENTRY(cublasLtMatmul)
ENTRY(cublasLtMatmulDescCreate)
ENTRY(cublasLtMatmulDescDestroy)
ENTRY(cublasLtMatmulDescSetAttribute)
ENTRY(cublasLtMatrixLayoutCreate)
ENTRY(cublasLtMatrixLayoutDestroy)
ENTRY(cublasLtMatmulPreferenceCreate)
ENTRY(cublasLtMatmulPreferenceDestroy)
ENTRY(cublasLtMatmulPreferenceSetAttribute)
ENTRY(cublasLtMatmulAlgoConfigGetAttribute)
#ifndef WITHOUT_HEURISTIC
ENTRY(cublasLtMatmulAlgoGetHeuristic)
#endif
