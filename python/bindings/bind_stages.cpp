#include <deltaic/runner.h>
#include <deltaic/step_hook.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "cpp/src/stages/codec_decoder.h"
#include "cpp/src/stages/hidden_tap.h"
#include "cpp/src/stages/stage_tensors.h"
#include "cpp/src/stages/talker.h"
#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Ints = py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>;

template <class T, class Array>
std::span<const T> values_of(const Array& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}
std::vector<float> copy_of(const Floats& array) { return {array.data(), array.data() + array.size()}; }

// [n, width]
template <class T>
py::array_t<T> as_rows(const std::vector<T>& values, std::int64_t width) {
  const auto count = static_cast<py::ssize_t>(values.size()) / width;
  py::array_t<T> rows(std::vector<py::ssize_t>{count, width});
  std::copy(values.begin(), values.end(), rows.mutable_data());
  return rows;
}

// The tensors of a checkpoint, or of a part of one.
struct StageTensors {
  StoredTensors tensors;
};

void bind_tensors(py::module_& m) {
  py::class_<StageTensors>(m, "StageTensors", "The tensors of a checkpoint of several models, or of a part of it.")
      .def(py::init([](const std::filesystem::path& path) { return StageTensors{open_stage_tensors(path)}; }),
           py::arg("path"), "Map a checkpoint folder or a safetensors file.")
      .def(
          "has", [](const StageTensors& self, const std::string& name) { return self.tensors.contains(name); },
          py::arg("name"))
      .def_property_readonly("num_bytes",
                             [](const StageTensors& self) {
                               std::int64_t total = 0;
                               for (const auto& [name, tensor] : self.tensors)
                                 total += static_cast<std::int64_t>(tensor.view.num_bytes());
                               return total;
                             })
      .def(
          "part",
          [](const StageTensors& self, const std::string& prefix) {
            return StageTensors{part_of(self.tensors, prefix)};
          },
          py::arg("prefix"), "Return those whose names start with a prefix, without it; ValueError for none.")
      .def(
          "as_text_model",
          [](const StageTensors& self, const std::string& embedding, const std::string& head) {
            return StageTensors{as_text_model(self.tensors, embedding, head)};
          },
          py::arg("embedding"), py::arg("head"), "Name an embedding and a head as a text model does.");
  m.def(
      "make_stage_runner",
      [](const ModelConfig& model, const StageTensors& tensors, const KVCacheConfig& kv_cache,
         const RunnerOptions& options) {
        TensorMap views;
        for (const auto& [name, tensor] : tensors.tensors)
          if (tensor.unreadable.empty()) views[name] = tensor.view;
        return ModelRunner(model, views, kv_cache, options);
      },
      py::arg("model"), py::arg("tensors"), py::arg("kv_cache"), py::arg("options"), py::keep_alive<0, 2>(),
      "Make the ModelRunner of one stage.");
}

void bind_talker(py::module_& m) {
  Struct<CodeSampling>(m, "CodeSampling", "How residual codes are chosen.")
      .field("do_sample", &CodeSampling::do_sample)
      .field("temperature", &CodeSampling::temperature)
      .field("top_k", &CodeSampling::top_k)
      .field("top_p", &CodeSampling::top_p);
  Struct<CodePredictorConfig>(m, "CodePredictorConfig", "Sizes of a code predictor.")
      .field("decoder", &CodePredictorConfig::decoder)
      .field("num_codebooks", &CodePredictorConfig::num_codebooks)
      .field("talker_hidden_size", &CodePredictorConfig::talker_hidden_size);
  Struct<TalkerConfig>(m, "TalkerConfig", "Sizes of a talker.")
      .field("hidden_size", &TalkerConfig::hidden_size)
      .field("vocab_size", &TalkerConfig::vocab_size)
      .field("text_vocab_size", &TalkerConfig::text_vocab_size)
      .field("text_hidden_size", &TalkerConfig::text_hidden_size)
      .field("projection_size", &TalkerConfig::projection_size)
      .field("predictor", &TalkerConfig::predictor);
  py::class_<Talker, StageRunner, py::smart_holder>(
      m, "Talker", "The embeddings and the code predictor around the decoder of a talker.")
      .def(py::init([](const TalkerConfig& config, const StageTensors& tensors, int max_num_reqs, int max_num_tokens,
                       int num_threads, std::shared_ptr<StageEdge> codes) {
             return std::make_unique<Talker>(config, tensors.tensors, max_num_reqs, max_num_tokens, num_threads,
                                             std::move(codes));
           }),
           py::arg("config"), py::arg("tensors"), py::kw_only(), py::arg("max_num_reqs"), py::arg("max_num_tokens"),
           py::arg("num_threads"), py::arg("codes"),
           "Make the stage; `codes` is the edge that takes what it hands over.")
      .def(
          "add_request",
          [](Talker& self, const std::string& req_id, const Floats& prompt, const Floats& text, const Floats& pad,
             const std::optional<Floats>& end, bool is_text_complete, const CodeSampling& sampling,
             std::optional<std::uint64_t> seed) {
            self.add_request(req_id, {.prompt = copy_of(prompt),
                                      .text = copy_of(text),
                                      .pad = copy_of(pad),
                                      .end = end ? copy_of(*end) : std::vector<float>(),
                                      .is_text_complete = is_text_complete,
                                      .sampling = sampling,
                                      .seed = seed});
          },
          py::arg("req_id"), py::kw_only(), py::arg("prompt"), py::arg("text"), py::arg("pad"),
          py::arg("end") = py::none(), py::arg("is_text_complete") = true, py::arg("sampling"),
          py::arg("seed") = py::none(),
          "Begin a request: its prompt, a row of text a frame, the row of frames behind the text, and the row that "
          "take_text puts behind text that has ended.")
      .def(
          "append_text",
          [](Talker& self, const std::string& req_id, const Floats& rows, bool is_last) {
            self.append_text(req_id, values_of<float>(rows), is_last);
          },
          py::arg("req_id"), py::arg("rows"), py::arg("is_last"))
      .def("take_text", &Talker::take_text, py::arg("text"),
           "Take the text that is due of all requests that have begun; return what is left.")
      .def("hand_over", &Talker::hand_over, py::arg("req_id"), "Hand over the codes that are not yet.")
      .def("remove_request", &Talker::remove_request, py::arg("req_id"))
      .def_property_readonly("num_requests", &Talker::num_requests)
      .def("take_ready_tokens", &Talker::take_ready_tokens,
           "Return the tokens whose input exists, of the requests for which it has changed; -1: no limit any more.")
      .def_property_readonly("num_predictor_calls", &Talker::num_predictor_calls)
      .def(
          "text_rows",
          [](const Talker& self, const Ints& ids) {
            return as_rows(self.text_rows(values_of<std::int32_t>(ids)), self.config().hidden_size);
          },
          py::arg("text_ids"), "Projected embeddings of text ids.")
      .def(
          "project_text",
          [](const Talker& self, const Floats& rows) {
            return as_rows(self.project_text(values_of<float>(rows)), self.config().hidden_size);
          },
          py::arg("embeddings"))
      .def(
          "project_hidden",
          [](const Talker& self, const Floats& rows) {
            return as_rows(self.project_hidden(values_of<float>(rows)), self.config().hidden_size);
          },
          py::arg("hidden"))
      .def(
          "codec_rows",
          [](const Talker& self, const Ints& ids) {
            return as_rows(self.codec_rows(values_of<std::int32_t>(ids)), self.config().hidden_size);
          },
          py::arg("codec_ids"), "Embeddings of codes and control tokens of the talker.")
      .def(
          "frame_rows",
          [](const Talker& self, const Ints& codes) {
            return as_rows(self.frame_rows(values_of<std::int32_t>(codes)), self.config().hidden_size);
          },
          py::arg("codes"), "The embeddings of whole frames, added up over their codebooks.");
}

void bind_hidden_tap(py::module_& m) {
  py::class_<HiddenTap, StepHook, py::smart_holder>(m, "HiddenTap", "Hands hidden states over an edge.")
      .def(py::init<int, std::shared_ptr<StageEdge>, PayloadKey>(), py::arg("layer"), py::arg("edge"), py::arg("key"));
}

void bind_codec(py::module_& m) {
  Struct<CodecTransformerConfig>(m, "CodecTransformerConfig", "Sizes of a codec's transformer.")
      .field("hidden_size", &CodecTransformerConfig::hidden_size)
      .field("num_layers", &CodecTransformerConfig::num_layers)
      .field("num_heads", &CodecTransformerConfig::num_heads)
      .field("num_kv_heads", &CodecTransformerConfig::num_kv_heads)
      .field("head_dim", &CodecTransformerConfig::head_dim)
      .field("intermediate_size", &CodecTransformerConfig::intermediate_size)
      .field("sliding_window", &CodecTransformerConfig::sliding_window)
      .field("rope_theta", &CodecTransformerConfig::rope_theta)
      .field("rms_norm_eps", &CodecTransformerConfig::rms_norm_eps);
  Struct<CodecConfig>(m, "CodecConfig", "Sizes of a codec decoder.")
      .field("transformer", &CodecConfig::transformer)
      .field("num_codebooks", &CodecConfig::num_codebooks)
      .field("codebook_size", &CodecConfig::codebook_size)
      .field("codebook_dim", &CodecConfig::codebook_dim)
      .field("latent_dim", &CodecConfig::latent_dim)
      .field("decoder_dim", &CodecConfig::decoder_dim)
      .field("upsampling_ratios", &CodecConfig::upsampling_ratios)
      .field("upsample_rates", &CodecConfig::upsample_rates);
  py::class_<CodecDecoder::Stream>(m, "CodecStream", "What one utterance's decoding keeps between pieces.")
      .def_property_readonly("num_frames", &CodecDecoder::Stream::num_frames)
      .def_property_readonly("num_samples", &CodecDecoder::Stream::num_samples)
      .def("copy", [](const CodecDecoder::Stream& self) { return self; }, "Return a stream that goes on by itself.");
  py::class_<CodecDecoder>(m, "CodecDecoder", "Turns frames of codes into samples, piece by piece.")
      .def(py::init([](const CodecConfig& config, const StageTensors& tensors, int num_threads) {
             return std::make_unique<CodecDecoder>(config, tensors.tensors, num_threads);
           }),
           py::arg("config"), py::arg("tensors"), py::arg("num_threads") = 0)
      .def("start", &CodecDecoder::start)
      .def(
          "decode",
          [](CodecDecoder& self, CodecDecoder::Stream& stream, const Ints& codes) {
            std::vector<float> samples;
            {
              py::gil_scoped_release unlocked;
              samples = self.decode(stream, values_of<std::int32_t>(codes));
            }
            py::array_t<float> result(static_cast<py::ssize_t>(samples.size()));
            std::copy(samples.begin(), samples.end(), result.mutable_data());
            return result;
          },
          py::arg("stream"), py::arg("codes"), "Return the samples that frames [n, num_codebooks] complete.")
      .def_property_readonly("samples_per_frame", &CodecDecoder::samples_per_frame)
      .def("num_samples", &CodecDecoder::num_samples, py::arg("num_frames"), "Samples of a whole stream.")
      .def_property_readonly("num_bytes", &CodecDecoder::num_bytes);
}

}  // namespace

void bind_stages(py::module_& m) {
  bind_tensors(m);
  bind_talker(m);
  bind_hidden_tap(m);
  bind_codec(m);
}
