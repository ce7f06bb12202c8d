#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpp/src/loader/safetensors.h"
#include "cpp/src/stages/codec_transformer.h"

namespace deltaic {

struct CodecConfig {
  CodecTransformerConfig transformer;
  int num_codebooks = 0;
  int codebook_size = 0;
  int codebook_dim = 0;  // of the quantizer's output; 0: codes are embedded by one table ("code_embedding")
  int latent_dim = 0;    // width between the transformer and the decoder
  int decoder_dim = 0;   // of the first convolution; each block halves it
  std::vector<int> upsampling_ratios;
  std::vector<int> upsample_rates;
};

// Turns frames of codes into samples: Qwen3-TTS's 12 Hz codec and Qwen3-Omni's code2wav. Everything in it is causal, so
// a stream that keeps the tails of its convolutions and the last keys and values gives the same samples, bit for bit,
// whatever pieces its frames come in.
class CodecDecoder {
 public:
  class Stream {
   public:
    std::int64_t num_frames() const { return state_.num_frames; }
    std::int64_t num_samples() const { return num_samples_; }

   private:
    friend class CodecDecoder;
    StreamState state_;
    std::int64_t num_samples_ = 0;
  };

  // Throws InvalidArgument for numbers below 1 of codebooks, codes or samples, and as WeightReader does.
  CodecDecoder(const CodecConfig& config, const StoredTensors& tensors, int num_threads);
  ~CodecDecoder();

  Stream start() const;
  // codes: [n, num_codebooks]. Returns the samples that they complete, in [-1, 1]. Throws InvalidArgument for a code
  // out of range, changing nothing.
  std::vector<float> decode(Stream& stream, std::span<const std::int32_t> codes);

  int samples_per_frame() const;
  // Samples of a whole stream: samples_per_frame() * num_frames, less what is trimmed at its start.
  std::int64_t num_samples(std::int64_t num_frames) const;
  const CodecConfig& config() const;
  std::int64_t num_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic
