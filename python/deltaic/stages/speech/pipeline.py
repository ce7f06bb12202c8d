"""Text in, sound out: thinker (where there is one), talker, decoder, stepped in turn."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deltaic import _core
from deltaic.detokenizer import IncrementalDecoder
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.request import EngineOutput
from deltaic.sampling_params import SamplingParams
from deltaic.stages.graph import Chunked, Full
from deltaic.stages.model import FloatArray, IntArray
from deltaic.stages.payload import crop_codes
from deltaic.stages.speech.audio import SilenceTrimmer
from deltaic.stages.speech.config import SpeechConfig, load_speech_config
from deltaic.stages.speech.memory import StageBudget, check_budgets
from deltaic.stages.speech.params import SpeechParams
from deltaic.stages.speech.prompt import NUM_END_TOKENS, NUM_ROLE_TOKENS, Prompt, PromptBuilder
from deltaic.stages.speech.stage_engine import StageSizes, make_stage_engine
from deltaic.stages.speech.utterance import (
    CODES,
    DEFAULT_CHUNK,
    TEXT,
    AudioChunk,
    AudioFinishReason,
    Utterance,
    speech_graph,
)
from deltaic.stages.speech.voices import ReferenceCache
from deltaic.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

NO_SOUND: FloatArray = np.zeros(0, np.float32)


class SpeechPipeline:
    """A checkpoint that speaks, loaded. Not thread-safe: add, step until nothing is left, read the chunks.

    A stage that fails ends the requests it was running, with an error; the others go on. Every request ends within
    timeout_s, sooner when a stage waits for stall_timeout_s in vain; None: no such limit. `chunk` says when
    frames are decoded: Full() gives one chunk at the end. max_frames and max_prompt_len (tokens) bound a request,
    max_num_seqs and max_num_batched_tokens a step of a stage. With memory_bytes, MemoryError names the stages when
    they need more. ValueError for a checkpoint that does not speak, Unsupported for a device other than the CPU.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        device: str = "auto",
        chunk: Chunked | Full = DEFAULT_CHUNK,
        max_num_seqs: int = 8,
        max_frames: int = 4096,
        max_prompt_len: int = 2048,
        max_num_batched_tokens: int = 512,
        num_threads: int = 0,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        timeout_s: float | None = 600.0,
        stall_timeout_s: float | None = None,
        poison_caches: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if device not in ("auto", "cpu"):
            raise _core.Unsupported(f"device is {device!r}: stages run on the CPU alone, use 'cpu' or 'auto'")
        for name, value in (("max_frames", max_frames), ("max_prompt_len", max_prompt_len)):
            if not 1 <= value < 1 << 31:
                raise ValueError(f"{name} must be in [1, 2^31), got {value}")
        if timeout_s is not None and not timeout_s > 0:  # nan too: a request would never end by it
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        self.config: SpeechConfig = load_speech_config(checkpoint)
        config = self.config
        self.max_frames = max_frames
        self._timeout_s = timeout_s
        self._clock = clock
        self.on_codes: Callable[[str, IntArray], None] | None = None  # is told of the frames that were decoded
        sizes = StageSizes(
            max_num_seqs=max_num_seqs,
            max_model_len=min(max_prompt_len + max_frames, config.talker_model.max_position_embeddings),
            max_num_batched_tokens=max_num_batched_tokens,
            num_threads=num_threads,
            num_blocks=num_blocks,
            poison_caches=poison_caches,
        )
        tensors = _core.StageTensors(config.folder)
        talker_tensors = tensors.part("talker.")
        codec_tensors = tensors if config.codec_path == config.folder else _core.StageTensors(config.codec_path)
        codec_tensors = codec_tensors.part(config.codec_prefix)
        if memory_bytes is not None:
            check_budgets(self._budgets(sizes, talker_tensors, codec_tensors), memory_bytes)
            sizes = replace(sizes, num_blocks=sizes.most_blocks())  # what was counted is what is taken

        self.graph = speech_graph(has_thinker=config.thinker_folder is not None, chunk=chunk)
        edges = {edge.source: edge.make(deadline_s=stall_timeout_s) for edge in self.graph.edges}
        self.codes: _core.StageEdge = edges["talker"]
        self.text: _core.StageEdge | None = edges.get("thinker")
        self.talker = _core.Talker(
            config.talker,
            talker_tensors,
            max_num_reqs=max_num_seqs,
            max_num_tokens=max_num_batched_tokens,
            num_threads=num_threads,
            codes=self.codes,
        )
        decoder_tensors = talker_tensors.as_text_model("model.codec_embedding.weight", "codec_head.weight")
        self.talker_engine = make_stage_engine(config.talker_model, decoder_tensors, sizes, self.talker)
        self.codec = _core.CodecDecoder(config.codec, codec_tensors, num_threads)
        self.references = ReferenceCache(self.codec)
        self.prompts = PromptBuilder(config, self.talker)
        self.tokenizer: Tokenizer | None = load_tokenizer(config.folder)
        self.thinker_engine: Engine | None = None
        self._thinker_eos_ids: list[int] = []
        if config.thinker_folder is not None:
            thinker = _core.load_model_config(config.thinker_folder)
            self._thinker_eos_ids = thinker.eos_token_ids
            self.thinker_engine = Engine.from_checkpoint(
                config.thinker_folder,
                EngineConfig(
                    device="cpu",
                    max_num_seqs=max_num_seqs,
                    max_model_len=min(max_prompt_len, thinker.max_position_embeddings),
                    enable_prefix_caching=False,
                    speculative_tokens=0,  # a rejected draft's hidden state must not be spoken
                    async_scheduling=False,
                    num_threads=num_threads,
                ),
            )
            self.thinker_engine.runner.set_step_hook(_core.HiddenTap(config.hidden_layer, edges["thinker"], TEXT))
        self._live: dict[str, Utterance] = {}  # by request id
        self._by_key: dict[str, Utterance] = {}
        self._generations = itertools.count()
        self._ready: list[AudioChunk] = []  # to be returned by the next step

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(self, request_id: str, text: str, params: SpeechParams | None = None) -> None:
        """Queue an utterance: the text itself, or with a thinker what is answered to it.

        ValueError, at once and alone, for what can never be spoken.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.config.folder} has no tokenizer.json: give token ids")
        params = params or self.default_params()
        encode = self.tokenizer.encode
        if not text.strip():
            raise ValueError("the text to speak is empty")
        if self.thinker_engine is not None:
            self._add_to_thinker(request_id, encode(text), params)
            return
        role, end = "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n"
        ids, num_role, num_end = encode(role + text + end), len(encode(role)), len(encode(end))
        instruct = f"<|im_start|>user\n{params.instruct}<|im_end|>\n" if params.instruct else ""
        self._add_text(request_id, ids[:num_role], ids[num_role:-num_end], params, encode(instruct) if instruct else [])

    def add_ids(
        self, request_id: str, token_ids: Any, params: SpeechParams | None = None, *, instruct_ids: Any = ()
    ) -> None:
        """Queue an utterance by token ids: of the text in Qwen's template, or with a thinker of its prompt."""
        params = params or self.default_params()
        if self.thinker_engine is not None:
            self._add_to_thinker(request_id, list(token_ids), params)
            return
        role, text = token_ids[:NUM_ROLE_TOKENS], token_ids[NUM_ROLE_TOKENS:-NUM_END_TOKENS]
        self._add_text(request_id, role, text, params, instruct_ids)

    def add_rows(self, request_id: str, prompt: Prompt, params: SpeechParams | None = None) -> None:
        """Queue an utterance by the rows of its prompt: of a thinker that runs elsewhere, say."""
        params = self._checked(request_id, params or self.default_params())
        with self._begin(request_id, params) as utterance:
            self._start_talker(utterance.key, prompt.rows, prompt.text, prompt.pad, params)

    def default_params(self) -> SpeechParams:
        """Return what applies when no SpeechParams are given."""
        return SpeechParams(max_frames=self.max_frames)

    def cancel(self, request_id: str) -> None:
        """End an utterance now; what is still on its way is dropped. The next step returns its final chunk."""
        utterance = self._live.get(request_id)
        if utterance is not None:
            self._end(utterance, "abort", None)

    def has_unfinished_requests(self) -> bool:
        """Return whether step() has something to run or to return."""
        return bool(self._live) or bool(self._ready)

    def stream(self, text: str, params: SpeechParams | None = None) -> Iterator[AudioChunk]:
        """Yield the chunks of one utterance as they are made, while nothing else runs. Leaving the loop cancels it."""
        request_id = f"stream-{next(self._generations)}"
        self.add(request_id, text, params)
        done = False
        try:
            while not done:
                for chunk in self.step():
                    if chunk.request_id == request_id:
                        done = chunk.is_final
                        yield chunk
        finally:
            self.cancel(request_id)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> list[AudioChunk]:
        """Step each stage once; return what is new."""
        now = self._clock()
        for edge in (self.text, self.codes):
            if edge is not None:
                edge.advance(now)
        for utterance in list(self._live.values()):
            if now >= utterance.expires_at:
                limit = utterance.params.timeout_s or self._timeout_s
                self._end(utterance, "error", f"the utterance did not end within {limit:.1f} s")
        if self.thinker_engine is not None and self.text is not None:
            self._step_thinker(self.thinker_engine, self.text)
        self._step_talker()
        for delivery in self.codes.take():
            if delivery.id in self._by_key:
                self._decode(self._by_key[delivery.id], delivery)
        ready, self._ready = self._ready, []
        return ready

    def _step_stage(self, name: str, engine: Engine) -> list[EngineOutput]:
        """Step an engine; one that raises ends what it runs, behind the sound that is there."""
        try:
            return engine.step() if engine.has_unfinished_requests() else []
        except Exception as error:
            logger.error("stage %s failed", name, exc_info=error)
            message = f"stage {name!r} failed: {type(error).__name__}: {error}"
            for utterance in list(self._live.values()):
                if utterance.is_talking if name == "talker" else not utterance.is_text_complete:
                    self._fail(utterance, message)
            return []

    def _step_thinker(self, engine: Engine, text: _core.StageEdge) -> None:
        for output in self._step_stage("thinker", engine):
            utterance = self._by_key.get(output.req_id)
            if utterance is None:
                continue
            if output.new_token_ids or output.finish_reason is not None:
                self._emit_text(utterance, output)
            if output.finish_reason is None:
                continue
            if output.finish_reason in ("error", "abort"):
                self._fail(utterance, output.error or "the thinker gave up")
            elif utterance.params.wants_sound:
                text.end(utterance.key)
            else:
                self._end(utterance, "length" if output.finish_reason == "length" else "stop", None)
        for delivery in self.talker.take_text(text):  # what is not more text of those that talk
            utterance = self._by_key.get(delivery.id)
            if utterance is None:
                continue
            if delivery.status is None:
                self._start_answer(utterance, delivery.rows(TEXT))
            elif delivery.status != _core.EndStatus.ok:
                self._fail(utterance, delivery.error)
            elif utterance.is_talking:
                self.talker.append_text(utterance.key, self.prompts.special_rows()[1:2], True)
            else:
                self._end(utterance, "error", "the thinker wrote nothing to speak")
        ready = self.talker.take_ready_tokens()
        for key in [key for key, count in ready.items() if count < 0]:
            self._by_key[key].is_text_complete = True
        self.talker_engine.set_num_ready_tokens(ready)

    def _emit_text(self, utterance: Utterance, output: EngineOutput) -> None:
        tokens, decoder = output.new_token_ids, utterance.text
        if tokens and tokens[-1] in self._thinker_eos_ids:
            tokens = tokens[:-1]
        text = "" if decoder is None else "".join(map(decoder.decode, tokens))
        if decoder is not None and output.finish_reason is not None:
            text += decoder.flush()
        if tokens or text:
            num_frames = utterance.num_frames_decoded
            self._ready.append(
                AudioChunk(utterance.request_id, NO_SOUND, False, None, None, num_frames, text, tuple(tokens))
            )

    def _start_answer(self, utterance: Utterance, hidden: FloatArray) -> None:
        """Start the talker of an answer: the hidden states of the thinker's prompt, and those of the answer so far.

        An answer's last token is never computed, so it is not spoken: it is the end of the text, unless the budget
        was reached.
        """
        begin = utterance.num_prompt_tokens
        if len(hidden) <= begin:
            return  # the end is next
        rows = self.talker.project_hidden(hidden)
        bos, end, pad = self.prompts.special_rows()
        first = np.concatenate([np.repeat(pad[None], NUM_ROLE_TOKENS, axis=0), rows[begin : begin + 1]])
        prompt = self.prompts.of_thinker(rows[:begin], first, utterance.params.voice.speaker, bos, pad)
        try:
            self._start_talker(
                utterance.key, prompt, rows[begin + 1 :], pad, utterance.params, end=end, is_text_complete=False
            )
        except Exception as error:  # of this request alone: the others go on
            logger.error("the talker refused %s", utterance.request_id, exc_info=error)
            self._end(utterance, "error", f"stage 'talker' failed: {error}")
            return
        utterance.is_talking = True

    def _step_talker(self) -> None:
        for output in self._step_stage("talker", self.talker_engine):
            if output.finish_reason is None and output.error is None:
                continue
            utterance = self._by_key.get(output.req_id)
            if utterance is None:
                continue
            if output.error is not None:
                self._fail(utterance, output.error)
                continue
            utterance.finish_reason = "length" if output.finish_reason == "length" else "stop"
            self.talker.hand_over(utterance.key)
            self.codes.end(utterance.key)
        for key, why in self.talker.take_failures().items():
            if key in self._by_key:
                self._fail(self._by_key[key], why)

    def _fail(self, utterance: Utterance, error: str) -> None:
        """End an utterance with an error behind the frames that are there; the stages stop working for it."""
        self._abort(utterance)
        self.talker.hand_over(utterance.key)
        if self.codes.is_open(utterance.key):
            self.codes.end(utterance.key, _core.EndStatus.error, error)
        else:
            self._end(utterance, "error", error)

    def _decode(self, utterance: Utterance, delivery: _core.Delivery) -> None:
        """Decode the frames that are due, or end the utterance."""
        if delivery.status is not None:
            reason = utterance.finish_reason if delivery.status == _core.EndStatus.ok else "error"
            self._end(utterance, reason or "stop", delivery.error or None)
            return
        rows = delivery.rows(CODES)
        codes = crop_codes(rows, rows[:, 0], codebook_size=self.config.codebook_size)
        num_left = delivery.num_left
        try:
            if self.codes.mode.left_context:  # each chunk anew, behind what was before it
                utterance.stream = self.references.start(utterance.params.voice.codes)
                self.codec.decode(utterance.stream, codes[:num_left])
            samples = self.codec.decode(utterance.stream, codes[num_left:])
        except Exception as error:
            self._end(utterance, "error", f"stage 'code2wav' failed: {type(error).__name__}: {error}")
            return
        utterance.num_frames_decoded += len(codes) - num_left
        if self.on_codes is not None and len(codes) > num_left:
            self.on_codes(utterance.request_id, codes[num_left:])
        if utterance.trimmer is not None:
            samples = utterance.trimmer.push(samples, is_last=False)
        if len(samples):
            self._ready.append(AudioChunk(utterance.request_id, samples, num_frames=utterance.num_frames_decoded))

    def _end(self, utterance: Utterance, reason: AudioFinishReason, error: str | None) -> None:
        """Deliver the final chunk, once, and forget the request in every stage."""
        if self._live.pop(utterance.request_id, None) is None:
            return
        del self._by_key[utterance.key]
        request_id = utterance.request_id
        samples = NO_SOUND
        if utterance.trimmer is not None:
            samples = utterance.trimmer.push(samples, is_last=True)
        if reason == "abort":  # what was held back is not heard any more
            samples = samples[:0]
        self._ready.append(
            AudioChunk(request_id, samples, True, reason, error, num_frames=utterance.num_frames_decoded)
        )
        self._abort(utterance)
        self._forget(utterance.key)

    def _abort(self, utterance: Utterance) -> None:
        if self.thinker_engine is not None:
            self.thinker_engine.abort([utterance.key])
        self.talker_engine.abort([utterance.key])

    def _forget(self, key: str) -> None:
        self.talker.remove_request(key)
        self.codes.forget(key)
        if self.text is not None:
            self.text.forget(key)

    def _checked(self, request_id: str, params: SpeechParams) -> SpeechParams:
        if not params.wants_sound and self.thinker_engine is None:
            raise ValueError("wants_sound is False, and there is no thinker that writes text")
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        if params.max_frames > self.max_frames:
            return params.with_fields(max_frames=self.max_frames, min_frames=min(params.min_frames, self.max_frames))
        return params

    def _add_text(self, request_id: str, role_ids: Any, text_ids: Any, params: SpeechParams, instruct_ids: Any) -> None:
        params = self._checked(request_id, params)
        prompt = self.prompts.of_text(
            role_ids,
            text_ids,
            params.voice,
            language=params.language,
            instruct_ids=instruct_ids,
            whole_text_first=params.whole_text_first,
        )
        self.add_rows(request_id, prompt, params)

    def _add_to_thinker(self, request_id: str, prompt_ids: list[int], params: SpeechParams) -> None:
        assert self.thinker_engine is not None
        params = self._checked(request_id, params)
        params.check_thinker_knows()
        self.prompts.check_speaker(params.voice.speaker)
        with self._begin(request_id, params, num_prompt_tokens=len(prompt_ids)) as utterance:
            self.thinker_engine.add_request(
                utterance.key,
                prompt_ids,
                SamplingParams(
                    temperature=params.temperature if params.do_sample else 0.0,
                    max_tokens=params.max_text_tokens,
                    seed=params.seed,
                ),
                eos_token_ids=self._thinker_eos_ids,
            )

    # ---- parts ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _begin(self, request_id: str, params: SpeechParams, num_prompt_tokens: int = 0) -> Iterator[Utterance]:
        """Make an utterance, and let it live when the block has handed it to its first stage.

        num_prompt_tokens: of the thinker, if one answers.
        """
        key = f"{request_id}/{next(self._generations)}"
        active = self.graph.active(wants_sound=params.wants_sound)
        limit = params.timeout_s or self._timeout_s
        silence_s = params.max_leading_silence_s
        utterance = Utterance(
            request_id=request_id,
            key=key,
            params=params,
            expires_at=float("inf") if limit is None else self._clock() + limit,
            stream=self.references.start(params.voice.codes),
            trimmer=None if silence_s is None else SilenceTrimmer.of_seconds(silence_s, self.config.sample_rate),
            num_prompt_tokens=num_prompt_tokens,
            is_talking=num_prompt_tokens == 0,
            is_text_complete=num_prompt_tokens == 0,
            text=None if self.tokenizer is None else IncrementalDecoder(self.tokenizer),
        )
        try:
            if num_prompt_tokens and self.text is not None and "talker" in active:
                self.text.open(key, num_prompt_tokens)
            yield utterance
        except BaseException:
            self._forget(key)
            raise
        self._live[request_id] = self._by_key[key] = utterance

    def _start_talker(
        self,
        key: str,
        rows: FloatArray,
        text: FloatArray,
        pad: FloatArray,
        params: SpeechParams,
        *,
        end: FloatArray | None = None,
        is_text_complete: bool = True,
    ) -> None:
        ids = self.config.ids
        self.talker.add_request(
            key,
            prompt=rows,
            text=text,
            pad=pad,
            end=end,
            is_text_complete=is_text_complete,
            sampling=params.code_sampling(),
            seed=None if params.seed in (None, -1) else int(params.seed) % 2**64,
        )
        try:
            self.codes.open(key)
            self.talker_engine.add_request(
                key, [ids.codec_pad] * len(rows), params.talker_params(self.config.codebook_size, ids.codec_eos)
            )
        except BaseException:
            self.talker.remove_request(key)
            raise

    def _budgets(
        self, sizes: StageSizes, talker: _core.StageTensors, codec: _core.StageTensors
    ) -> dict[str, StageBudget]:
        model = self.config.talker_model
        kv_bytes = 2 * 4 * model.num_kv_heads * model.head_dim * model.num_layers_of(_core.LayerKind.full_attention)
        budgets = {}
        if self.config.thinker_folder is not None:
            budgets["thinker"] = StageBudget(_core.StageTensors(self.config.thinker_folder).num_bytes)
        budgets["talker"] = StageBudget(talker.num_bytes, sizes.most_blocks() * sizes.block_size * kv_bytes)
        budgets["code2wav"] = StageBudget(codec.num_bytes)
        return budgets
