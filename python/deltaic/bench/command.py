"""`deltaic bench latency`, `throughput`, `serve` and `kernels`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deltaic.bench.plot import check_plot, plot_latency, plot_library, plot_serving
from deltaic.cli_options import (
    CommandError,
    Debug,
    EngineFields,
    Model,
    engine_options,
    usage,
)
from deltaic.engine_config import EngineConfig

bench_app = typer.Typer(
    name="bench",
    help="Measure latency, throughput, a server, or the kernels.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


@bench_app.callback()
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


Bandwidth = Annotated[
    float | None, typer.Option(help="GB/s that the device reaches at most. Default: measured, or known.")
]
DraftAcceptance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="GPU: accept each draft with this probability, whatever it is. The tokens mean nothing; the times do.",
    ),
]
Flops = Annotated[float | None, typer.Option(help="TFLOP/s that the device reaches at most. Default: likewise.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw latency against load into this PNG (needs deltaic[plot]).")]
DatasetName = Annotated[str, typer.Option(help="Kind of prompts: random.")]


class ManyValues(TyperCommand):
    """A command whose repeatable options take several values at once: --batch-size 1 4 8."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        option = None  # the repeatable option that further values belong to
        for i, arg in enumerate(args):
            if arg.startswith("-") and not _is_number(arg):
                option = arg if arg in repeatable else None
            elif option is not None and args[i - 1] != option:
                spread.append(option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@bench_app.command(cls=ManyValues)
@engine_options(without=("max_num_seqs",), enable_prefix_caching=False, speculative_tokens="0")
def latency(
    model: Model = None,
    batch_size: Annotated[
        list[int], typer.Option(min=1, help="Requests at once; several values are measured in turn.")
    ] = [8],  # noqa: B006
    input_len: Annotated[list[int], typer.Option(min=1, help="Tokens of a prompt; likewise.")] = [32],  # noqa: B006
    output_len: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 128,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Runs of each batch before the measured ones.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured runs of each batch.")] = 5,
    *,
    engine: EngineFields,
    draft_acceptance: DraftAcceptance = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    output_json: OutputJson = None,
    plot: Plot = None,
    debug: Debug = False,
) -> None:
    """Time batches of equal requests: prefill, and steps in which every request gets a token."""
    from deltaic.bench import latency as bench
    from deltaic.bench.ceilings import check_given
    from deltaic.bench.loading import load_engine, memory_facts, model_positions
    from deltaic.bench.report import check_writable, write_json
    from deltaic.progress import ProgressBar

    workloads = [bench.Workload(size, length, output_len) for length in input_len for size in batch_size]
    if plot is not None:
        plot_library()
    with usage():
        check_given(bandwidth, flops)
        if output_json is not None:
            check_writable(output_json)
        if plot is not None:
            check_plot(plot)
        num_positions = model_positions(model, engine["load_format"])
        budget, length = engine["max_num_batched_tokens"], engine["max_model_len"]
        engine["max_model_len"] = bench.needed_model_len(workloads, budget, length, num_positions)
        config = EngineConfig(**engine, max_num_seqs=max(batch_size))
    loaded = load_engine(
        model, config, input_len[0], bandwidth=bandwidth, flops=flops, draft_acceptance=draft_acceptance
    )
    if draft_acceptance is not None:
        print(f"drafts are accepted by a script, with probability {draft_acceptance:g}: tokens mean nothing, times do")
    samples: list[list[bench.Sample]] = []
    for workload in workloads:
        with ProgressBar(num_iters, None, f"batch {workload.batch_size}, {workload.input_len} tokens") as bar:
            samples.append([])
            for sample in bench.measure(loaded.engine, workload, num_iters_warmup, num_iters):
                samples[-1].append(sample)
                bar.advance(1)
    loaded.settle_ceilings()
    results = [
        bench.describe(workload, of_it, loaded.costs, loaded.ceilings)
        for workload, of_it in zip(workloads, samples, strict=True)
    ]
    print(bench.latency_table(results))
    loaded.explain(results)
    if output_json is not None:
        extra = {
            "device_memory": memory_facts(loaded.engine),
            "num_iters": num_iters,
            "draft_acceptance": draft_acceptance,
            "results": results,
        }
        write_json(output_json, loaded.facts | extra | bench.vllm_names(results))
    if plot is not None:
        plot_latency(plot, loaded.name, results)


@bench_app.command()
@engine_options(enable_prefix_caching=False, speculative_tokens="0")
def throughput(
    model: Model = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all queued at once.")] = 100,
    dataset_name: DatasetName = "random",
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens of a prompt.")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", min=1, help="Tokens that a request generates.")
    ] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Draw lengths from [len x (1 - ratio), len x (1 + ratio)].")
    ] = 0.0,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 2,
    seed: Annotated[int, typer.Option(help="Of lengths and prompts.")] = 0,
    *,
    engine: EngineFields,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    output_json: OutputJson = None,
    debug: Debug = False,
) -> None:
    """Run many requests, all queued at once, and count what came out a second."""
    from deltaic.bench import throughput as bench
    from deltaic.bench.ceilings import check_given
    from deltaic.bench.lengths import check_dataset, random_requests
    from deltaic.bench.loading import load_engine, memory_facts
    from deltaic.bench.report import check_writable, write_json
    from deltaic.progress import ProgressBar

    with usage():
        check_dataset(dataset_name)
        check_given(bandwidth, flops)
        if output_json is not None:
            check_writable(output_json)
        requests = random_requests(num_prompts, input_len, output_len, random_range_ratio, seed)
        longest = max(request.prompt_len + request.output_len for request in requests)
        config = EngineConfig(**engine | {"max_model_len": engine["max_model_len"] or longest})
        if config.max_model_len is not None and config.max_model_len < longest:
            raise ValueError(
                f"max_model_len = {config.max_model_len} has no room for {longest} tokens, "
                "the longest prompt with its answer"
            )
    loaded = load_engine(model, config, requests[0].prompt_len, bandwidth=bandwidth, flops=flops)
    bench.run_requests(loaded.engine, requests[:num_warmups], seed=seed + 1)
    with ProgressBar(len(requests), None, "requests") as bar:
        result = bench.run_requests(loaded.engine, requests, seed, bar.advance)
    line = (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    loaded.settle_ceilings()
    max_num_seqs = loaded.engine.scheduler_config.max_num_seqs
    bound = bench.bound_seconds(requests, max_num_seqs, loaded.costs, loaded.ceilings)
    result |= {"bound_time": bound, "share_of_bound": bound / result["elapsed_time"]}
    print(f"{line}, {100 * result['share_of_bound']:.0f} % of the bound")
    print(f"Total num prompt tokens:  {result['num_prompt_tokens']}")
    print(f"Total num output tokens:  {result['num_output_tokens']}")
    loaded.explain([result])
    if output_json is not None:
        write_json(output_json, loaded.facts | {"device_memory": memory_facts(loaded.engine)} | result)


@bench_app.command(cls=ManyValues)
def serve(
    base_url: Annotated[
        str | None, typer.Option(help="Of the server: http://host:port. Instead of --host, --port.")
    ] = (None),
    host: str = "127.0.0.1",
    port: int = 8000,
    backend: Annotated[str, typer.Option(help="openai (completions; also as vllm) or openai-chat.")] = "openai",
    endpoint: Annotated[str | None, typer.Option(help="Path. Default: that of the backend.")] = None,
    model: Annotated[str | None, typer.Option(help="Name for the server. Default: the first of /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key that the server wants.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 1000,
    dataset_name: DatasetName = "random",
    request_rate: Annotated[
        list[float], typer.Option(help="Requests a second, at random times; inf: all at once. Several values: in turn.")
    ] = [float("inf")],  # noqa: B006
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; more: evenly.")] = 1.0,
    max_concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Most requests at once; likewise.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens (chat: words) of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Draw lengths from [len x (1 - ratio), len x (1 + ratio)].")
    ] = 0.0,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts of completions are token ids below this.")] = 1000,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")] = False,
    temperature: Annotated[float, typer.Option(help="Of all requests.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and times.")] = 0,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 1,
    ready_check_timeout_sec: Annotated[float, typer.Option(help="Wait so long for the server to answer.")] = 60.0,
    request_timeout_sec: Annotated[
        float, typer.Option(help="Give a request up that says nothing for so long.")
    ] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Most ms of a good request: ttft:200 tpot:20 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Times to show.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to show.")] = "99",
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file for each load.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With every request in it.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where --save-result writes.")] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="Its name. Default: from backend, load, model, time.")] = (
        None
    ),
    plot: Plot = None,
    model_config: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder or config.json of the server's model: shows shares of its bound."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="With --model-config: what the server runs on: auto, cpu, cuda.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="With --model-config: what it computes in.")] = "auto",
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    debug: Debug = False,
) -> None:
    """Load a server that has OpenAI's interface, and time its streams."""
    from deltaic.bench import serve as bench
    from deltaic.bench.ceilings import check_given, describe_ceilings, notes_on_shares
    from deltaic.bench.http_client import Url, authority
    from deltaic.bench.lengths import check_dataset
    from deltaic.bench.report import check_writable, write_json
    from deltaic.bench.serve_bound import ServerBound
    from deltaic.bench.serving import describe, details, sweep_table

    with usage():
        check_dataset(dataset_name)
        check_given(bandwidth, flops)
        if plot is not None:
            check_plot(plot)
        if save_result or save_detailed:
            check_writable(result_dir / (result_filename or "result.json"))
        settings = bench.ServeSettings(
            base_url=base_url or f"http://{authority(host, port)}",
            backend=backend,
            endpoint=endpoint,
            model=model,
            api_key=api_key,
            num_prompts=num_prompts,
            burstiness=burstiness,
            input_len=random_input_len,
            output_len=random_output_len,
            range_ratio=random_range_ratio,
            vocab_size=vocab_size,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            num_warmups=num_warmups,
            ready_timeout_s=ready_check_timeout_sec,
            request_timeout_s=request_timeout_sec,
            goodput=bench.parse_goodput(goodput or []),
            metrics=bench.parse_metrics(percentile_metrics),
            percentiles=bench.parse_percentiles(metric_percentiles),
        )
        limits: list[int | None] = list(max_concurrency or []) or [None]
        loads = [bench.Load(rate, most) for rate in request_rate for most in limits]
        if result_filename is not None and len(loads) > 1:
            raise ValueError(f"result_filename is one name, {len(loads)} loads are asked for: leave it out")
        bound = None
        if model_config is not None:
            config = EngineConfig(device=device, dtype=dtype)
            bound = ServerBound.find(
                model_config, config, Url.parse(settings.base_url), bandwidth=bandwidth, flops=flops
            )
    results = []
    for result, answers in bench.run(settings, loads):
        if bound is not None:
            bound.settle()
            result |= bound.shares(answers, result["duration"], result["max_concurrent_requests"])
            result["ceilings"] = dataclasses.asdict(bound.ceilings)
        print(describe(result, settings.metrics, settings.percentiles), flush=True)
        results.append(result)
        if save_result or save_detailed:
            extra = details(answers) if save_detailed else {}
            path = result_dir / (result_filename or bench.file_name(result))
            write_json(path, result | extra)
    if len(results) > 1:
        print(sweep_table(results))
    if bound is not None:
        for line in (describe_ceilings(bound.ceilings), *notes_on_shares(results)):
            print(line, file=sys.stderr)
    if plot is not None:
        plot_serving(plot, str(results[0]["model_id"]), results)
    if not any(result["completed"] for result in results):
        raise CommandError(f"no request succeeded; the first error: {results[0]['first_error']}", 1)


@bench_app.command()
def kernels(
    names: Annotated[
        list[str] | None, typer.Argument(help="Programs of bench/kernels to run. Default: all that are built.")
    ] = None,
    build_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a build; may be given several times. Default: build/cuda, ci, dev."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run the programs of bench/kernels; each prints times and shares of the bound."""
    from deltaic.bench.kernels import BUILD_FOLDERS, HOW_TO_BUILD, find_kernel_benches, run_kernel_bench

    folders = build_dir or [Path(folder) for folder in BUILD_FOLDERS]
    found = find_kernel_benches(folders)
    if not found:
        raise CommandError(f"no kernel bench is built in {', '.join(map(str, folders))}; {HOW_TO_BUILD}", 1)
    if unknown := set(names or []) - found.keys():
        raise CommandError(f"{min(unknown)} is not built; there are {', '.join(sorted(found))}", 2)
    failed = []
    for name in names or sorted(found):
        print(f"== {name} ({found[name]})", flush=True)
        if run_kernel_bench(found[name]) != 0:
            failed.append(name)
    if failed:
        raise CommandError(f"failed: {', '.join(failed)}", 1)
