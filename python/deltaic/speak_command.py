"""`deltaic speak`: text in, a WAV file out."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltaic.cli_options import CommandError, Debug, Device, NumThreads, Seed, usage

if TYPE_CHECKING:
    from deltaic.stages.graph import Chunked, Full


def speak(
    text: Annotated[str, typer.Argument(help="'-' reads it from stdin.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder or hub id of a model that speaks.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="WAV file; '-' writes 16-bit little-endian samples to stdout.")
    ] = "speech.wav",
    speaker: Annotated[str | None, typer.Option(help="A speaker of the checkpoint.")] = None,
    language: Annotated[str, typer.Option(help="A language of the checkpoint, or auto.")] = "auto",
    instruct: Annotated[str, typer.Option(help="How to speak, in words, for models that take it.")] = "",
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Longest utterance.")] = 120.0,
    seed: Seed = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely codes.")] = False,
    max_leading_silence: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of silence that may stand in front; default: all.")
    ] = None,
    chunk_first: Annotated[int, typer.Option(min=1, help="Frames of the first chunk.")] = 4,
    chunk_size: Annotated[int, typer.Option(min=1, help="Frames of the later chunks.")] = 25,
    async_chunk: Annotated[
        bool, typer.Option("--async-chunk/--no-async-chunk", help="Decode while the talker speaks, or once at the end.")
    ] = True,
    device: Device = "auto",
    num_threads: NumThreads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object about the utterance.")] = False,
    debug: Debug = False,
) -> None:
    """Speak a text into a WAV file, a chunk at a time; a pipeline with a thinker speaks its answer."""
    from deltaic.checkpoint import resolve_model
    from deltaic.stages.graph import Chunked, Full
    from deltaic.stages.speech import SpeechParams, SpeechPipeline, Voice, load_speech_config

    if text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise CommandError("TEXT is empty: there is nothing to speak", 2)
    if output == "-" and as_json:
        raise CommandError("--json and '-o -' both write to stdout: name a file", 2)
    with usage():
        chunk: Chunked | Full = Chunked(chunk_first, chunk_size) if async_chunk else Full()
    if not math.isfinite(max_seconds):
        raise CommandError(f"--max-seconds must be finite, got {max_seconds}", 2)
    if device not in ("auto", "cpu"):
        raise CommandError(f"a model that speaks runs on the CPU, got --device {device}", 2)
    check_can_write(output)
    folder = resolve_model(model)
    max_frames = max(2, int(max_seconds * load_speech_config(folder).frames_per_second))
    if max_frames >= 1 << 31:
        raise CommandError(f"--max-seconds is {max_seconds:g}, more frames than an utterance may have", 2)
    pipeline = SpeechPipeline(folder, chunk=chunk, max_num_seqs=1, max_frames=max_frames, num_threads=num_threads)
    with usage():
        params = SpeechParams(
            voice=Voice(speaker=speaker),
            language=language,
            instruct=instruct,
            do_sample=not greedy,
            codes_do_sample=not greedy,
            max_frames=max_frames,
            seed=seed,
            max_leading_silence_s=max_leading_silence,
        )
    report = write_speech(pipeline, text, params, output)
    if as_json:
        print(json.dumps(report))
    elif sys.stderr.isatty():
        print(describe(report), file=sys.stderr)


def check_can_write(output: str) -> None:
    """Refuse what can be no file, before anything is loaded."""
    if output == "-":
        return
    path = Path(output)
    if not output or path.is_dir():
        raise CommandError(f"--output must name a file, got {output!r}", 2)
    if path.is_fifo():
        raise CommandError(f"--output is the pipe {output!r}, where a WAV file has no end: '-' writes samples", 2)
    if not path.parent.is_dir():
        raise CommandError(f"--output is {output!r}, and there is no folder {str(path.parent)!r}", 2)


def write_speech(pipeline: Any, text: str, params: Any, output: str) -> dict[str, Any]:
    """Write the chunks as they come; return what there is to say of them."""
    from deltaic.stages.speech.audio import WavWriter, to_pcm16

    begin = time.perf_counter()
    chunks = pipeline.stream(text, params)
    num_samples, num_chunks, first_s = 0, 0, None
    final = None
    first = next(chunks)  # a refused text leaves a file that is there as it is
    writer = None if output == "-" else WavWriter(output, pipeline.config.sample_rate)
    try:
        for chunk in itertools.chain([first], chunks):
            final = chunk
            if not len(chunk.samples):
                continue
            if first_s is None:
                first_s = time.perf_counter() - begin
            num_samples += len(chunk.samples)
            num_chunks += 1
            if writer is None:
                sys.stdout.buffer.write(to_pcm16(chunk.samples))
                sys.stdout.buffer.flush()
            else:
                writer.write(chunk.samples)
    finally:
        if writer is not None:
            writer.close()
    assert final is not None
    if final.error is not None:
        raise CommandError(f"speaking failed: {final.error}", 1)
    seconds = num_samples / pipeline.config.sample_rate
    return {
        "output": output,
        "sample_rate": pipeline.config.sample_rate,
        "num_samples": num_samples,
        "num_frames": final.num_frames,
        "num_chunks": num_chunks,
        "finish_reason": final.finish_reason,
        "time_to_first_chunk_s": first_s,
        "time_s": time.perf_counter() - begin,
        "audio_s": seconds,
    }


def describe(report: dict[str, Any]) -> str:
    first, total, audio = report["time_to_first_chunk_s"] or 0.0, report["time_s"], report["audio_s"]
    cut = "; cut at the longest length" if report["finish_reason"] == "length" else ""
    return f"{audio:.2f} s of speech in {total:.2f} s, the first after {first:.2f} s{cut}"
