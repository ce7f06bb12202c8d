"""The asynchronous interface on an engine that says what a test tells it to, and on the bundled model."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltaic import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, text_engine
from deltaic.async_llm import EngineStopped, QueueFull, RequestFailed
from deltaic.tokenizer import Tokenizer
from scripted_engine import ScriptedEngine

LONG = SamplingParams(temperature=0, max_tokens=1000)
DELTA = replace(LONG, output_kind=RequestOutputKind.DELTA)
Maker = Callable[..., tuple[AsyncLLM, ScriptedEngine]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[Maker]:
    made: list[AsyncLLM] = []

    def make(says: Any = "fine", *, engine: dict[str, Any] | None = None, **options: Any) -> Any:
        script = says if callable(says) else lambda *_: tokenizer.encode(says)
        scripted = ScriptedEngine(script, **(engine or {}))

        class Engine:
            @staticmethod
            def from_checkpoint(path: Path, config: object) -> ScriptedEngine:
                return scripted

        monkeypatch.setattr(text_engine, "Engine", Engine)
        made.append(AsyncLLM(**options))
        return made[-1], scripted

    yield make
    for llm in made:
        llm.shutdown()


def forever(*_: object) -> list[int]:
    return [7] * 100_000


# Engine options under which `forever` takes ten seconds to reach max_tokens, however fast the machine is.
SLOW: dict[str, Any] = {"on_step": lambda: time.sleep(0.01)}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


def test_outputs_of_each_kind(make: Maker) -> None:
    llm, _ = make("Once upon a time")
    deltas = asyncio.run(collect(llm, "x", DELTA))
    assert len(deltas) > 1
    assert "".join(output.text for output in deltas) == "Once upon a time"
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    cumulative = asyncio.run(collect(llm, "x", LONG))
    assert len(cumulative) == len(deltas)
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(cumulative))
    (final,) = asyncio.run(collect(llm, "x", replace(LONG, output_kind=RequestOutputKind.FINAL_ONLY)))
    assert final.text == cumulative[-1].text == "Once upon a time"


def test_messages_go_through_the_template(make: Maker, tokenizer: Tokenizer) -> None:
    llm, engine = make()
    asyncio.run(collect(llm, [{"role": "user", "content": "Hi"}], LONG, request_id="mine"))
    assert tokenizer.decode(engine.seen["mine"].prompt_token_ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(TypeError, match="add_generation_prompt is for messages"):
        asyncio.run(collect(llm, "text", LONG, add_generation_prompt=True))


def test_bad_requests_are_refused_alone(make: Maker) -> None:
    llm, engine = make()
    with pytest.raises(ValueError, match="at least 1 token"):
        asyncio.run(collect(llm, "", LONG))
    refused = ValueError("request can never fit")
    add = engine.add_request

    def add_request(req_id: str, *args: Any, **options: Any) -> None:
        if req_id == "big-1":
            raise refused
        add(req_id, *args, **options)

    engine.add_request = add_request  # type: ignore[method-assign]

    async def submit_two() -> None:
        given = llm.inputs.process("x", LONG)
        await llm.submit([given, given], request_id="big")

    with pytest.raises(ValueError, match="can never fit"):
        asyncio.run(submit_two())
    assert engine.aborted == ["big-0"]
    assert llm.num_unfinished == 0
    assert asyncio.run(collect(llm, "x", LONG))[-1].text == "fine"


def test_cancelling_aborts(make: Maker) -> None:
    llm, engine = make(forever, engine=SLOW)

    async def cancel() -> None:
        task = asyncio.ensure_future(collect(llm, "x", DELTA, request_id="mine"))
        while not engine.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    until(lambda: engine.aborted == ["mine"])
    until(lambda: llm.num_unfinished == 0)
    until(lambda: llm.stats().num_running == 0)


def test_leaving_the_loop_aborts(make: Maker) -> None:
    llm, engine = make(forever, engine=SLOW)

    async def leave() -> None:
        outputs = llm.generate("x", DELTA)
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    until(lambda: len(engine.aborted) == 1)


def test_closed_event_loop_aborts(make: Maker) -> None:
    llm, engine = make(forever, engine=SLOW)

    async def walk_away() -> None:
        stream = await llm.submit([llm.inputs.process("x", DELTA)])
        stream._num_unfinished = 0  # nobody closes it

    asyncio.run(walk_away())
    until(lambda: len(engine.aborted) == 1)
    assert asyncio.run(collect(make()[0], "x", LONG))[-1].text == "fine"


def test_failed_step_reaches_only_its_requests(make: Maker) -> None:
    llm, _ = make(engine={"failing": {"bad": "OutOfMemory: no memory"}})

    async def both() -> list[Any]:
        return await asyncio.gather(
            collect(llm, "x", LONG, request_id="bad"), collect(llm, "x", LONG), return_exceptions=True
        )

    failed, good = asyncio.run(both())
    assert isinstance(failed, RequestFailed)
    assert str(failed) == "request bad failed: OutOfMemory: no memory"
    assert good[-1].text == "fine"
    llm.check_health()


def test_full_queue(make: Maker) -> None:
    llm, _ = make(forever, engine={"max_num_seqs": 2, **SLOW}, max_waiting=1)

    async def fill() -> None:
        given = llm.inputs.process("x", replace(DELTA, n=3, temperature=1.0))
        async with await llm.submit([given]):
            with pytest.raises(QueueFull, match=r"3 completions are queued or running, 1 more .* limit of 3"):
                await llm.submit([llm.inputs.process("x", DELTA)])
        while llm.num_unfinished:
            await asyncio.sleep(0.001)
        (await llm.submit([llm.inputs.process("x", DELTA)])).close()

    asyncio.run(fill())


def test_request_id_in_use(make: Maker) -> None:
    llm, _ = make(forever, engine=SLOW)

    async def twice() -> None:
        given = llm.inputs.process("x", DELTA)
        async with await llm.submit([given], request_id="a"):
            with pytest.raises(ValueError, match="request_id 'a' is in use"):
                await llm.submit([given], request_id="a")

    asyncio.run(twice())


def test_stuck_step_is_seen(make: Maker) -> None:
    release = threading.Event()
    llm, _ = make(engine={"on_step": lambda: release.wait(10) and None}, stall_timeout_s=0.05)
    llm.check_health()

    async def wait() -> str:
        task = asyncio.ensure_future(collect(llm, "x", LONG))
        await asyncio.sleep(0.2)
        with pytest.raises(EngineStopped, match="stuck: a step runs since"):
            llm.check_health()
        release.set()
        return (await task)[-1].text

    assert asyncio.run(wait()) == "fine"
    until(lambda: llm._thread.is_idle)
    llm.check_health()


def test_dead_loop_ends_every_request(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    def die() -> None:
        raise IndexError("a defect")

    llm, _ = make(engine={"on_step": die})
    with pytest.raises(EngineStopped, match="the engine died: IndexError: a defect"):
        asyncio.run(collect(llm, "x", LONG))
    with pytest.raises(EngineStopped, match="a defect"):
        llm.check_health()
    with pytest.raises(EngineStopped, match="a defect"):
        asyncio.run(collect(llm, "x", LONG))
    assert "the engine's loop died" in caplog.text
    assert llm.shutdown()


def test_shutdown_ends_what_runs(make: Maker) -> None:
    llm, engine = make(forever, engine=SLOW)

    async def stop() -> None:
        stream = await llm.submit([llm.inputs.process("x", DELTA)])
        await stream.__anext__()
        assert await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineStopped, match="was shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStopped, match="was shut down"):
            await llm.submit([llm.inputs.process("x", DELTA)])

    asyncio.run(stop())
    assert engine.running == {}
    assert llm.num_unfinished == 0
    assert llm.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"max_waiting": -1},
        {"max_waiting": "many"},
        {"max_waiting": None},
        {"stall_timeout_s": 0},
        {"stall_timeout_s": "long"},
        {"stall_timeout_s": None},
        {"stall_timeout_s": float("nan")},
        {"block_size": 0},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        AsyncLLM(**options)


def test_option_that_is_none_is_named() -> None:
    for name, nearest in (("max_wating", "max_waiting"), ("num_thread", "num_threads")):
        with pytest.raises(TypeError, match=f"AsyncLLM has no option '{name}': did you mean '{nearest}'"):
            AsyncLLM(**{name: 3})


def test_bundled_model_says_what_llm_says() -> None:
    """Two engines, one after the other and at once, in one process; every block comes back."""
    small = {"max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20, "enable_prefix_caching": False}
    prompts = ["Once upon a time", "The king said", "There was", "A small dog", "In the sea"]
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = [output.text for output in LLM(**small).generate(prompts, params)]
    for _ in range(2):
        with AsyncLLM(**small) as llm:

            async def run(llm: AsyncLLM = llm) -> list[str]:
                kind = replace(params, output_kind=RequestOutputKind.DELTA)
                outputs = await asyncio.gather(*(collect(llm, prompt, kind) for prompt in prompts))
                return ["".join(output.text for output in deltas) for deltas in outputs]

            assert asyncio.run(run()) == expected
            until(lambda llm=llm: llm.stats().num_running == 0)  # type: ignore[misc]
            assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
