// Into how many parts the keys of a request are split in decode attention on CUDA: the one place that decides, for the
// size of the workspace and the kernels. It depends on the request's length alone.
#pragma once

#ifdef __CUDACC__
#define DELTAIC_HOST_DEVICE __host__ __device__
#else
#define DELTAIC_HOST_DEVICE
#endif

namespace deltaic::ops {

// Splits are multiples of kKeyStep keys, short enough to spread a short request over many processors, and longer for
// long requests, of which none has more than kMaxSplits.
inline constexpr int kKeyStep = 128, kMaxSplits = 64;

DELTAIC_HOST_DEVICE inline int keys_per_split(int seq_len) {
  return (kKeyStep / 2 + seq_len / kMaxSplits + kKeyStep - 1) / kKeyStep * kKeyStep;
}
DELTAIC_HOST_DEVICE inline int num_splits(int seq_len) {
  const int keys = keys_per_split(seq_len);
  return (seq_len + keys - 1) / keys;
}
// No request of up to max_seq_len keys has more.
inline int max_splits(int max_seq_len) {
  const long long len = max_seq_len, least = kKeyStep / 2 * kMaxSplits;
  return static_cast<int>((kMaxSplits * len + least + len - 1) / (least + len));
}

}  // namespace deltaic::ops
