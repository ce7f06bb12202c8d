"""`bench latency`, `throughput` and `kernels`, on models of a few kilobytes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltaic import _core, cli
from deltaic.bench import ceilings as ceilings_module
from deltaic.bench.ceilings import (
    Ceilings,
    describe_ceilings,
    find_ceilings,
    measure_again,
    measure_cpu,
    notes_on_shares,
)
from deltaic.bench.latency import Sample, Workload, describe, needed_model_len, run_workload
from deltaic.bench.lengths import random_requests
from deltaic.bench.report import percentile, summary, table
from deltaic.bench.throughput import bound_seconds, run_requests
from deltaic.device import place
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import DeviceMemory, plan_memory
from deltaic.model_costs import ModelCosts
from tiny_model import TINY

BOUND = ("--bandwidth", "10", "--flops", "0.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json alone, under another name."""
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def make_engine(path: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 8, "enable_prefix_caching": False} | options
    return Engine.from_checkpoint(path, EngineConfig(device="cpu", load_format="dummy", **given))


# ---- a workload ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [None, 16])
def test_every_request_gets_its_tokens_in_full_steps(
    model: Path, max_num_batched_tokens: int | None, async_scheduling: bool
) -> None:
    """Where the prompts take several steps, the first requests go on until the last has its tokens."""
    engine = make_engine(model, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=async_scheduling)
    for seed in range(2):
        sample = run_workload(engine, Workload(batch_size=5, input_len=20, output_len=9), seed)
        assert len(sample.ttfts) == 5
        assert len(sample.steps) == 8
        assert sample.num_step_tokens == 5 * 8
        assert 0 < min(sample.ttfts) <= sample.prefill < sample.latency
        assert sum(sample.steps) <= sample.latency - sample.prefill + 1e-9
        assert not engine.has_unfinished_requests()
        assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
        spread = max(sample.ttfts) - min(sample.ttfts)
        assert (spread > 0) == (max_num_batched_tokens is not None)


def test_one_token_has_no_steps(model: Path) -> None:
    sample = run_workload(make_engine(model), Workload(3, 4, 1), seed=0)
    assert (sample.steps, sample.num_step_tokens) == ([], 0)
    result = describe(Workload(3, 4, 1), [sample], *costs_and_ceilings(model))
    assert (result["median_step_ms"], result["output_throughput"]) == (0.0, 0.0)
    assert result["prefill_share_of_bound"] > 0


def test_request_that_fails_ends_the_measurement(model: Path) -> None:
    engine = make_engine(model)

    def fail() -> None:
        raise RuntimeError("no luck")

    engine.runner = SimpleNamespace(execute_model=lambda _: None, sample_tokens_async=fail)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a request of batch 2 failed: RuntimeError: no luck"):
        run_workload(engine, Workload(2, 4, 3), seed=0)


def test_room_for_the_head_start_of_the_first_request() -> None:
    work = [Workload(1, 10, 5), Workload(128, 1024, 64)]
    needed = needed_model_len(work, None, None, 4096)
    assert 1024 + 64 + 128 * 1024 // 2048 < needed < 1024 + 64 + 100
    assert needed_model_len(work, 65536, None, 4096) < needed
    assert needed_model_len(work, None, 1088, 4096) == 1088
    assert needed_model_len(work, None, None, 1100) == 1100
    with pytest.raises(ValueError, match="input_len 1024 and output_len 64 are together beyond max_model_len 1087"):
        needed_model_len(work, None, 1087, 4096)
    with pytest.raises(ValueError, match="together beyond the model's 1087 positions"):
        needed_model_len(work, None, None, 1087)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def costs_and_ceilings(path: Path) -> tuple[ModelCosts, Ceilings]:
    model = _core.load_model_config(path)
    costs = ModelCosts(model, place(model, EngineConfig(device="cpu")))
    return costs, Ceilings(10e9, 0.1e12, "given")


def test_result_of_a_workload_worked_out_by_hand(model: Path) -> None:
    costs, ceilings = costs_and_ceilings(model)
    samples = [
        Sample(ttfts=[0.1, 0.2], steps=[0.01, 0.03], num_step_tokens=4, latency=0.24),
        Sample(ttfts=[0.2, 0.3], steps=[0.02, 0.02], num_step_tokens=4, latency=0.34),
    ]
    found = describe(Workload(2, 100, 3), samples, costs, ceilings)
    assert found["avg_latency"] == pytest.approx(0.29)
    assert found["percentiles"]["50"] == pytest.approx(0.29)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_prefill_ms"] == pytest.approx(250)
    assert (found["median_step_ms"], found["mean_step_ms"]) == pytest.approx((20, 20))
    assert (found["num_steps"], found["tokens_per_step"]) == (4, 1.0)
    assert found["output_throughput"] == pytest.approx(8 / 0.08)
    drafted = [Sample(ttfts=[0.1], steps=[0.01, 0.03], num_step_tokens=5, latency=0.24)]
    with_drafts = describe(Workload(1, 100, 6), drafted, costs, ceilings)
    assert (with_drafts["tokens_per_step"], with_drafts["mean_step_ms"]) == (2.5, pytest.approx(20))
    assert with_drafts["mean_tpot_ms"] == pytest.approx(8)
    bound = costs.decode_step(2, 101.5).seconds(10e9, 0.1e12)
    assert found["step_share_of_bound"] == pytest.approx(bound / 0.02)


def test_percentiles_and_tables() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([], 50) == 0.0
    assert summary("x", [0.001, 0.003], (25,)) == pytest.approx(
        {"mean_x_ms": 2.0, "median_x_ms": 2.0, "std_x_ms": 1.0, "p25_x_ms": 1.5}
    )
    assert table(["a", "long"], [["100", "1"]]) == "  a  long\n100     1"


def test_ceilings_of_the_cpu_are_measured_and_can_be_given(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: it takes memory that tests of other processes' memory would see.
    program = "from deltaic import _core; print(*_core.measure_cpu_ceilings(1))"
    measured = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    bytes_per_second, flops_per_second = map(float, measured.split())
    assert 1e8 < bytes_per_second < 1e12
    assert 1e8 < flops_per_second < 1e13

    monkeypatch.setattr(_core, "measure_cpu_ceilings", lambda _: (20e9, 0.1e12))
    monkeypatch.setattr(ceilings_module, "_num_cores", lambda _: 1)
    monkeypatch.setattr(ceilings_module, "_busy_seconds", lambda: 0.0)
    placement = place(_core.load_model_config(model), EngineConfig(device="cpu"))
    assert find_ceilings(placement) == Ceilings(20e9, 0.1e12, "measured now")
    assert find_ceilings(placement, bandwidth=10, flops=0.5) == Ceilings(10e9, 0.5e12, "given")
    found = find_ceilings(placement, flops=0.5)
    assert found == Ceilings(20e9, 0.5e12, "given and measured now")
    assert describe_ceilings(found) == "bound: 20.0 GB/s, 0.50 TFLOP/s (given and measured now)"


def test_busy_cpu_is_measured_again_and_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others slow a measurement down; one thread alone is timed by its own CPU time."""
    found = iter([(10e9, 1e11), (12e9, 1e11), (15e9, 3e11), (11e9, 1e11), (9e9, 2e11), (12e9, 1.2e11)] * 2)
    threads: list[int] = []

    def measure(num_threads: int) -> tuple[float, float]:
        threads.append(num_threads)
        return next(found)

    monkeypatch.setattr(_core, "measure_cpu_ceilings", measure)
    monkeypatch.setattr(ceilings_module, "_num_cores", lambda _: 8)
    loads = iter([0.6, 0.3, 0.4, 0.7, 0.0])
    monkeypatch.setattr(ceilings_module._OtherLoad, "share", lambda _: next(loads))
    first = measure_cpu(4)
    assert threads == [4, 1] * 3
    # 4 threads on 8 cores: four times what one does.
    assert first == Ceilings(15e9, 4.8e11, "measured now", 0.3)
    assert "while other processes used 30 % of the CPU: may be too low" in describe_ceilings(first)
    again = measure_again(first, 4)
    assert threads == [4, 1] * 5  # the last one was not disturbed
    assert again == Ceilings(15e9, 4.8e11, "measured now", 0.0)
    assert describe_ceilings(again).endswith("(measured now)")
    assert measure_again(again, 4) is again
    given = Ceilings(1.0, 1.0, "given")
    assert measure_again(given) is given


def test_load_of_other_processes_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        load = ceilings_module._OtherLoad()
        time.sleep(0.5)
        others = load.share()
        busy.kill()
    assert others > 0.3 / (os.cpu_count() or 1)
    load = ceilings_module._OtherLoad()
    until = time.process_time() + 0.5
    while time.process_time() < until:  # what this process does is not another's
        pass
    assert load.share() < 1.0
    assert ceilings_module._num_cores([0]) == 1


def test_share_above_all_is_explained() -> None:
    assert notes_on_shares([{"step_share_of_bound": 0.99, "share_of_bound": None}]) == []
    (line,) = notes_on_shares([{"step_share_of_bound": 0.5}, {"share_of_bound": 1.01}])
    assert line.startswith("a share above 100 % says that a ceiling is too low")


def test_ceilings_of_a_gpu_are_known_by_its_name_or_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(_core.load_model_config(model), EngineConfig(), _core.Device(_core.DeviceType.cuda, 1))
    names = {1: "NVIDIA H200"}
    monkeypatch.setattr(_core, "device_name", lambda device: names[device.index])
    found = find_ceilings(placement)
    assert (found.bytes_per_second, found.flops_per_second) == (4.3e12, 803e12)
    names[1] = "NVIDIA Unknown"
    monkeypatch.setattr(_core, "measure_gpu_ceilings", lambda index: (index * 1e12, 2e14))
    assert find_ceilings(placement) == Ceilings(1e12, 2e14, "measured now")
    assert find_ceilings(placement, bandwidth=5) == Ceilings(5e9, 2e14, "given and measured now")
    assert find_ceilings(placement, bandwidth=1, flops=2) == Ceilings(1e9, 2e12, "given")


# ---- throughput ------------------------------------------------------------------------------------------------------


def test_all_requests_are_run_and_counted(model: Path) -> None:
    requests = random_requests(20, 30, 6, 0.5, seed=2)
    assert requests == random_requests(20, 30, 6, 0.5, seed=2)
    assert {r.prompt_len for r in requests} <= set(range(15, 46))
    finished: list[int] = []
    found = run_requests(make_engine(model, max_num_seqs=4), requests, 0, finished.append)
    assert sum(finished) == found["num_requests"] == 20
    assert found["num_prompt_tokens"] == sum(r.prompt_len for r in requests)
    assert found["num_output_tokens"] == sum(r.output_len for r in requests)
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    with pytest.raises(ValueError, match="random_range_ratio must be in"):
        random_requests(1, 1, 1, 1.0, seed=0)


def test_bound_of_a_throughput_grows_with_work_and_falls_with_batches(model: Path) -> None:
    costs, ceilings = costs_and_ceilings(model)
    requests = random_requests(16, 64, 32, 0.0, seed=0)
    bounds = [bound_seconds(requests, size, costs, ceilings) for size in (1, 4, 16)]
    assert bounds == sorted(bounds, reverse=True)
    assert bound_seconds(requests * 2, 16, costs, ceilings) == pytest.approx(2 * bounds[2])


def test_what_is_said_of_a_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine of the CPU stands in for one on a GPU, of which there need be none."""
    from deltaic.bench import loading

    gpu = _core.Device(_core.DeviceType.cuda, 0)
    engine = make_engine(model)
    shapes = engine.runner.model_config
    before, after = DeviceMemory(20 * 10**9, 10 * 10**9), (4 * 10**9, 20 * 10**9)
    config = EngineConfig(device="cuda", load_format="dummy", kv_cache_memory_bytes=10**9)
    engine.memory_plan = plan_memory(shapes, config, placement=place(shapes, config, gpu), memory=before)
    monkeypatch.setattr(loading.Engine, "from_checkpoint", lambda *_, **__: engine)
    monkeypatch.setattr(_core, "num_cuda_devices", lambda: 1)
    monkeypatch.setattr(_core, "device_memory", lambda _: after)
    monkeypatch.setattr(_core, "device_name", lambda _: "NVIDIA H200")
    loaded = loading.load_engine(str(model), config, 8)
    err = capsys.readouterr().err
    assert re.search(r"device memory: 6\.00 GB taken, 1\.\d+ GB planned, 4\.00 GB free of 20\.00 GB", err)
    assert "bound: 4,300.0 GB/s, 803.00 TFLOP/s (measured on an NVIDIA H200)" in err
    assert (loaded.facts["device"], loaded.facts["dtype"]) == ("cuda:0", "bf16")
    found = loading.memory_facts(engine)
    assert (found["taken"], found["free"], found["total"]) == (6 * 10**9, 4 * 10**9, 20 * 10**9)
    assert found["planned"] < 2 * 10**9


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_latency_command_measures_several_batches_in_one_process(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(
        [
            *("bench", "latency", "--model", str(model), "--load-format", "dummy", "--device", "cpu"),
            *("--batch-size", "1", "4", "8", "--input-len", "16", "32", "--output-len", "4", *BOUND),
            *("--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(tmp_path / "out" / "r.json")),
            *("--plot", str(tmp_path / "plot.png")),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert re.search(r"tiny, .* parameters .* on cpu, loaded in [0-9.]+ s, first token [0-9.]+ s after the start", err)
    assert "bound: 10.0 GB/s, 0.10 TFLOP/s (given)" in err
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())
    assert head[:4] == ["batch", "input", "output", "prefill ms"]
    assert [row[:3] for row in rows] == [[str(b), str(n), "4"] for n in (16, 32) for b in (1, 4, 8)]
    assert all(len(row) == len(head) and row[10].endswith("%") for row in rows)
    saved = json.loads((tmp_path / "out" / "r.json").read_text())
    assert [(r["batch_size"], r["input_len"]) for r in saved["results"]] == [
        (b, n) for n in (16, 32) for b in (1, 4, 8)
    ]
    assert all(r["num_steps"] == 2 * 3 and len(r["latencies"]) == 2 for r in saved["results"])
    assert (saved["device"], saved["load_format"], saved["startup_seconds"] > 0) == ("cpu", "dummy", True)
    assert "avg_latency" not in saved  # of several workloads
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_file_of_one_workload_has_vllms_names(model: Path, tmp_path: Path) -> None:
    args = ["bench", "latency", "--model", str(model), "--load-format", "dummy", "--device", "cpu", "--batch-size", "2"]
    args += ["--input-len", "8", "--output-len", "3", "--num-iters", "2", "--num-iters-warmup", "0", *BOUND]
    assert cli.run([*args, "--output-json", str(tmp_path / "r.json")]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    (result,) = saved["results"]
    assert saved["avg_latency"] == result["avg_latency"] == pytest.approx(sum(saved["latencies"]) / 2)
    assert len(saved["latencies"]) == 2
    assert sorted(map(int, saved["percentiles"])) == [10, 25, 50, 75, 90, 99]


@pytest.mark.parametrize(
    "command",
    [
        ["latency", "--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "0"],
        ["throughput", "--num-prompts", "2"],
    ],
    ids=["latency", "throughput"],
)
def test_ceilings_of_a_busy_machine_are_those_measured_again(
    command: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["bench", *command, "--model", str(model), "--load-format", "dummy", "--device", "cpu"]
    args += ["--input-len", "8", "--output-len", "3", "--num-threads", "1"]
    measured = [Ceilings(1e9, 1e9, "measured now", 0.5), Ceilings(2e9, 4e9, "measured now", 0.01)]
    asked: list[int] = []

    def measure(num_threads: int) -> Ceilings:
        asked.append(num_threads)
        return measured[len(asked) - 1]

    def bounds(name: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        assert cli.run([*args, *more, "--output-json", str(tmp_path / name)]) == 0
        saved = json.loads((tmp_path / name).read_text())
        (result,) = saved.get("results", [saved])
        return saved["ceilings"], {key: result[key] for key in result if "bound" in key and "share" not in key}

    monkeypatch.setattr(ceilings_module, "measure_cpu", measure)
    ceilings, found = bounds("measured.json")
    assert asked == [1, 1]
    assert ceilings == dataclasses.asdict(measured[1])
    assert "measured again, bound: 2.0 GB/s, 0.00 TFLOP/s (measured now)" in capsys.readouterr().err
    assert found
    assert bounds("given.json", "--bandwidth", "2", "--flops", "0.004")[1] == found
    assert asked == [1, 1]  # what is given is not measured
    assert "measured again" not in capsys.readouterr().err


def test_share_above_all_is_explained_where_it_is_shown(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "throughput", "--model", str(model), "--load-format", "dummy", "--device", "cpu"]
    args += ["--num-prompts", "2", "--input-len", "8", "--output-len", "3"]
    assert cli.run([*args, "--bandwidth", "0.00001", "--flops", "0.0000001"]) == 0
    assert "a share above 100 % says" in capsys.readouterr().err


def test_latency_command_runs_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "latency", "--device", "cpu", "--batch-size", "2", "--input-len", "8", "--output-len", "3"]
    assert cli.run([*args, "--num-iters", "1", "--num-iters-warmup", "0", *BOUND]) == 0
    assert "default_model" in capsys.readouterr().err


def test_throughput_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(
        [
            *("bench", "throughput", "--model", str(model), "--load-format", "dummy", "--device", "cpu"),
            *("--num-prompts", "12", "--random-input-len", "20", "--output-len", "5", "--random-range-ratio", "0.4"),
            *("--dataset-name", "random"),
            *(*BOUND, "--output-json", str(tmp_path / "t.json")),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert re.match(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s, \d+ % of the", out)
    saved = json.loads((tmp_path / "t.json").read_text())
    assert saved["num_requests"] == 12
    assert {"elapsed_time", "total_num_tokens", "requests_per_second", "tokens_per_second"} <= saved.keys()
    assert 0 < saved["share_of_bound"] < 1


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["latency", "--batch-size", "0"], 2, "--batch-size"),
        (["latency", "--batch-size", "x"], 2, "--batch-size"),
        (["latency", "--input-len", "4000", "--output-len", "200"], 2, "beyond the model's 4096 positions"),
        (["latency", "--input-len", "10", "--output-len", "9", "--max-model-len", "18"], 2, "together beyond"),
        (["latency", "--device", "tpu"], 2, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["latency", "--device", "cpu", "--dtype", "bfloat16"], 1, "dtype must be auto or float32 on the CPU"),
        (["latency", "--load-format", "gguf"], 2, "load_format must be one of"),
        (["latency", "extra"], 2, "extra"),
        (["throughput", "--random-range-ratio", "1"], 2, "random_range_ratio"),
        (["throughput", "--dataset-name", "sharegpt"], 2, "dataset_name must be random: prompts of random tokens, got"),
        (["latency", "--bandwidth", "0"], 2, "bandwidth must be a finite number above 0, got 0"),
        (["latency", "--flops", "-1"], 2, "flops must be a finite number above 0, got -1"),
        (["throughput", "--bandwidth", "nan"], 2, "bandwidth must be a finite number above 0, got nan"),
        (["latency", "--output-json", "/dev/null/x.json"], 2, "/dev/null/x.json cannot be written: "),
        (["latency", "--output-json", "/tmp"], 2, "/tmp cannot be written: it is a folder"),
        (["throughput", "--output-json", "/dev/null/x.json"], 2, "/dev/null/x.json cannot be written: "),
        (
            ["throughput", "--input-len", "8", "--output-len", "2", "--max-model-len", "9"],
            2,
            "max_model_len = 9 has no",
        ),
        (["nope"], 2, "No such command"),
    ],
)
def test_what_is_asked_wrongly_is_named(
    args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", *args]) == code
    assert words in capsys.readouterr().err


def test_plot_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deltaic.bench import plot

    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(plot, "import_module", refuse)
    assert cli.run(["bench", "latency", "--plot", "x.png"]) == 1
    assert f"{sys.executable} -m pip install 'deltaic[plot]'" in capsys.readouterr().err


def test_plot_of_another_kind_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.run(["bench", "latency", "--plot", "/tmp/x.xyz"]) == 2
    shown = capsys.readouterr()
    assert "plot must end in one of" in shown.err
    assert shown.out == ""


# ---- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_that_are_built_are_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "cuda", tmp_path / "dev"]
    for folder, name, text in ((0, "one", "first"), (1, "one", "second"), (1, "two", "other")):
        folders[folder].mkdir(exist_ok=True)
        path = folders[folder] / f"bench_{name}"
        path.write_text(f"#!/bin/sh\necho {text}\n")
        path.chmod(0o755)
    (folders[1] / "bench_notes.txt").write_text("not a program")
    args = [*("bench", "kernels", "--build-dir", str(folders[0]), "--build-dir", str(folders[1]))]
    assert cli.run(args) == 0
    out = capfd.readouterr().out
    assert re.findall(r"^(first|second|other)$", out, re.MULTILINE) == ["first", "other"]
    assert cli.run([*args, "two"]) == 0
    assert capfd.readouterr().out.endswith("other\n")
    assert cli.run([*args, "three"]) == 2
    assert "three is not built; there are one, two" in capfd.readouterr().err
    (folders[1] / "bench_two").write_text("#!/bin/sh\nexit 3\n")
    assert cli.run(args) == 1
    assert capfd.readouterr().err == "error: failed: two\n"


def test_kernels_that_are_not_built_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "kernels", "--build-dir", str(tmp_path)]) == 1
    assert "ninja -C build/cuda benches" in capsys.readouterr().err
