"""The command line: `deltaic generate`, `chat`, `speak`, `serve`, `bench` and `info`.

Exit codes: 0, 1 for what failed, 2 for what was asked wrongly; 130 after Ctrl-C. Errors are one line on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltaic._core import __version__
from deltaic.bench.command import bench_app
from deltaic.cli_options import (
    CommandError,
    Debug,
    EngineFields,
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    engine_options,
    usage,
)
from deltaic.extras import how_to_install
from deltaic.speak_command import speak

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deltaic.async_llm import AsyncLLM
    from deltaic.llm import LLM
    from deltaic.outputs import RequestOutput
    from deltaic.sampling_params import SamplingParams
    from deltaic.server.speech_engine import SpeechEngine

FIRST_PROMPT = "Once upon a time"

app = typer.Typer(
    name="deltaic",
    help="Run hybrid language models: Gated DeltaNet and full attention.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)
app.command()(speak)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        print(f"deltaic {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@engine_options(without=("load_format", "max_num_seqs", "enable_prefix_caching"))
def generate(
    prompt: Annotated[str | None, typer.Argument(help=f"'-' reads it from stdin. Default: {FIRST_PROMPT!r}.")] = None,
    model: Model = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt, or continue it. Default: --raw for the bundled model and "
            "for models without a chat template.",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = 128,
    min_tokens: Annotated[int | None, typer.Option(help="Let nothing end the text within so many tokens.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    presence_penalty: Annotated[float | None, typer.Option(help="[-2, 2]: discourage tokens that came.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="[-2, 2]: the same, each time again.")] = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end of the text.")] = False,
    *,
    engine: EngineFields,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show tokens and times on stderr.")] = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or answer it; the text streams to stdout."""
    from deltaic.chat import find_chat_template
    from deltaic.checkpoint import resolve_model

    if prompt == "-":
        prompt = sys.stdin.read()
    if prompt is None:
        if model is not None:
            raise CommandError("PROMPT is missing: give a text, or '-' to read it from stdin", 2)
        prompt = FIRST_PROMPT
    folder = resolve_model(model)
    if chat is None:
        chat = model is not None and find_chat_template(folder) is not None
    if system is not None and not chat:
        raise CommandError("--system needs --chat: a text that is continued has no system message", 2)
    params = sampling_params(
        folder,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos,
    )
    llm = load(folder, **engine, enable_prefix_caching=False)  # no second request could use it
    given: Any = prompt
    if chat:
        given = [{"role": "user", "content": prompt}]
        if system is not None:
            given.insert(0, {"role": "system", "content": system})
    if as_json:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a failed request is reported below
            output = (llm.chat if chat else llm.generate)(given, params)[0]
        if output.outputs[0].error is not None:
            raise CommandError(f"generation failed: {output.outputs[0].error}", 1)
        print(json.dumps(as_object(output, folder), ensure_ascii=False))
    else:
        if sys.stdout.isatty() and not chat:
            sys.stdout.write(prompt)  # a person reads the two as one text
        output = write_stream(llm, given, params)
    if stats:
        print(describe(output), file=sys.stderr)


@app.command()
@engine_options(without=("load_format", "max_num_seqs"))
def chat(
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    *,
    engine: EngineFields,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, not as markdown.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show tokens and times after each answer.")] = False,
    debug: Debug = False,
) -> None:
    """Converse with a model; /help shows the commands."""
    from deltaic.chat_session import ChatSession, PlainDisplay
    from deltaic.checkpoint import resolve_model

    folder = resolve_model(model)
    params = sampling_params(
        folder,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
    )
    llm = load(folder, **engine)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        ChatSession(llm, params, system=system, interactive=sys.stdin.isatty(), stats=stats).run()
        return
    from rich.console import Console

    from deltaic.chat_terminal import MarkdownDisplay, keyboard_kept_for_the_prompt, make_reader

    print(f"deltaic {__version__}, {folder.name}. /help shows the commands; Alt-Enter breaks a line.", file=sys.stderr)
    display = PlainDisplay(sys.stdout) if plain else MarkdownDisplay(Console())
    session = ChatSession(llm, params, read=make_reader(), display=display, system=system, stats=stats)
    with keyboard_kept_for_the_prompt():
        session.run()


@app.command()
@engine_options()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id; the bundled model if left out.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all, so that others can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that requests must carry; may be given several times. Default: DELTAIC_API_KEY."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; may be given several times.")
    ] = None,
    *,
    engine: EngineFields,
    seed: Annotated[int | None, typer.Option(help="Make requests without a seed of their own repeatable.")] = None,
    max_logprobs: Annotated[int, typer.Option(help="Most log probabilities of a token; -1: no limit.")] = 20,
    max_waiting: Annotated[int, typer.Option(help="Most completions that wait; more are answered 429.")] = 1024,
    max_concurrent_requests: Annotated[
        int, typer.Option(help="Most requests that are read or answered at once; more are answered 429.")
    ] = 2048,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request; a larger one is answered 413.")] = 8 << 20,
    stall_timeout: Annotated[float, typer.Option(help="Seconds after which a step makes /health fail.")] = 120.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Show a line for each request.")] = False,
    debug: Debug = False,
) -> None:
    """Answer OpenAI's HTTP interface until Ctrl-C or SIGTERM."""
    try:
        from deltaic.server.app import create_app
        from deltaic.server.run import address, listen, run_app
        from deltaic.server.settings import ServerSettings
        from deltaic.server.speech_app import create_speech_app
        from deltaic.server.speech_engine import load_speech_engine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "deltaic":
            raise
        raise CommandError(f"serve needs {error.name}, which is not installed: {how_to_install('serve')}", 1) from error
    from deltaic.async_llm import AsyncLLM, check_limits
    from deltaic.checkpoint import resolve_model
    from deltaic.engine_config import EngineConfig
    from deltaic.stages.speech import is_speech_checkpoint

    folder = resolve_model(model, engine["load_format"])
    if not api_key and (key := os.environ.get("DELTAIC_API_KEY")) is not None:
        # Not by typer, to which several words are several keys, and none is no key.
        if not key.strip():
            raise CommandError("DELTAIC_API_KEY is set and empty: unset it to serve without a key", 2)
        api_key = [key.strip()]
    limits: dict[str, Any] = {"max_waiting": max_waiting, "stall_timeout_s": stall_timeout}
    with usage():
        EngineConfig(**engine)
        check_limits(**limits)
        settings = ServerSettings(
            served_model_names=served_model_name or [folder.name],
            api_keys=api_key or (),
            max_body_bytes=max_body_bytes,
            max_concurrent_requests=max_concurrent_requests,
        )
    with listen(host, port) as sock:  # before the model is loaded: it may take long, and the port may be taken
        app: FastAPI
        llm: AsyncLLM | SpeechEngine
        if is_speech_checkpoint(folder):
            if engine["device"] not in ("auto", "cpu"):
                raise CommandError(f"a model that speaks runs on the CPU, got --device {engine['device']}", 2)
            llm = load_speech_engine(
                folder, max_num_seqs=engine["max_num_seqs"] or 8, num_threads=engine["num_threads"], **limits
            )
            app = create_speech_app(llm, settings)
        else:
            llm = AsyncLLM(folder, seed=seed, max_logprobs=max_logprobs, **limits, **engine)
            app = create_app(llm, settings)
        print(f"serving {settings.served_model_names[0]} at http://{address(sock)}/v1", file=sys.stderr, flush=True)
        run_app(app, llm, sock, access_log=access_log)


@app.command()
@engine_options(without=("load_format", "enforce_eager", "enable_prefix_caching", "speculative_tokens", "num_threads"))
def info(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder, config.json or hub id; the bundled model if left out.")
    ] = None,
    *,
    engine: EngineFields,
    device_memory: Annotated[
        str | None, typer.Option(help="Plan for a GPU with so much memory (141GB, 24GiB), whether there is one or not.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Show what a model is and how memory is divided for it; reads no weights."""
    from deltaic.checkpoint import resolve_model
    from deltaic.engine_config import EngineConfig
    from deltaic.model_info import describe_model, model_info, parse_size

    with usage():
        config = EngineConfig(**engine)
        memory_bytes = None if device_memory is None else parse_size("device_memory", device_memory)
    found = model_info(resolve_model(model, "dummy"), config, memory_bytes)  # a config.json alone is enough
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        for name, value in describe_model(found):
            print(f"{name:<14}{value}")


def sampling_params(folder: Path, **given: Any) -> SamplingParams:
    """Return what was given, over the defaults of the model's generation_config.json."""
    from deltaic.checkpoint import default_sampling_fields
    from deltaic.sampling_params import SamplingParams

    defaults = default_sampling_fields(folder)
    with usage():
        return SamplingParams.from_optional(defaults, **given)


def load(folder: Path, **options: Any) -> LLM:
    """Load a model for one request at a time, with a sign of life on a terminal."""
    from deltaic.engine_config import EngineConfig
    from deltaic.llm import LLM

    with usage():
        EngineConfig(max_num_seqs=1, **options)
    if not sys.stderr.isatty():
        return LLM(folder, max_num_seqs=1, **options)
    from rich.console import Console

    with Console(stderr=True).status(f"loading {folder.name}"):
        return LLM(folder, max_num_seqs=1, **options)


def write_stream(llm: LLM, given: Any, params: SamplingParams) -> RequestOutput:
    """Write the text as it comes; return the last output, which holds the counts."""
    output = None
    for output in llm.stream_outputs(given, params):
        sys.stdout.write(output.text)
        sys.stdout.flush()
    assert output is not None  # a request ends with an output
    sys.stdout.write("\n")
    sys.stdout.flush()
    return output


def as_object(output: RequestOutput, folder: Path) -> dict[str, Any]:
    completion = output.outputs[0]
    metrics = output.metrics
    return {
        "model": str(folder),
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(completion.token_ids),
        "time_to_first_token_s": metrics and metrics.time_to_first_token,
        "tokens_per_second": metrics and metrics.tokens_per_second,
    }


def describe(output: RequestOutput) -> str:
    metrics = output.metrics
    if metrics is None or metrics.time_to_first_token is None:
        return f"{len(output.prompt_token_ids)} prompt tokens, no output"
    rate = metrics.tokens_per_second
    return (
        f"{len(output.prompt_token_ids)} prompt tokens, {metrics.num_generation_tokens} output tokens, "
        f"first after {metrics.time_to_first_token * 1e3:.0f} ms"
        + ("" if rate is None else f", then {rate:.1f} tokens/s")
    )


def run(args: Sequence[str]) -> int:
    """Run a command line; return the exit code."""
    options = list(args)[: list(args).index("--")] if "--" in args else list(args)
    debug = "--debug" in options
    try:
        code = app(args=list(args), prog_name="deltaic", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, exit_code = explain(error, debug)
        print(f"error: {message}", file=sys.stderr)
        return exit_code
    return code if isinstance(code, int) else 0


def explain(error: Exception, debug: bool) -> tuple[str, int]:
    """Return the line for an error and its exit code."""
    from deltaic.checkpoint import one_line

    if isinstance(error, CommandError):
        return one_line(error), error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # what typer raises for a wrong command line
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" (see {context.command_path} --help)"
        return " ".join(error.format_message().split()) + hint, error.exit_code
    if isinstance(error, (ValueError, NotImplementedError, MemoryError, OSError, RuntimeError)):
        return one_line(error), 1
    hint = "" if debug else " (a defect of deltaic; --debug shows where)"
    return f"{type(error).__name__}: {one_line(error)}{hint}", 1


def open_missing_streams() -> None:
    """Give streams that the caller closed a place to go; their numbers must not fall to the files of a model."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
        setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))


def main() -> None:
    open_missing_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
