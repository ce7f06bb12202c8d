"""Figures for Prometheus, under vLLM's names with the prefix deltaic:."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaic.async_llm import AsyncLLM
from deltaic.input_processor import EngineInput
from deltaic.outputs import RequestOutput

_LABELS = ["model_name"]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_MOST_TOKENS = 1 << 31  # a client may ask for a number that is no float
_COUNTS = (1, 2, 5, 10, 20)


class _EngineCollector(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        cache = stats.cache
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests that hold a row of the batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of attention blocks that live requests hold; 1 is all.", stats.cache_usage),
            ("num_state_snapshots", "Recurrent states kept for prefixes.", cache.num_snapshots),
        ]
        counters: list[tuple[str, str, float]] = [
            ("num_preemptions", "Requests that gave their blocks back and waited again.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of admitted requests, prefix hits included.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.num_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found there.", cache.num_hit_tokens),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"deltaic:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"deltaic:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter


class ServerMetrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(llm, model_name))
        self._model_name = model_name
        self._success = Counter(
            "deltaic:request_success",
            "Completions that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self._registry,
        )
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival.", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between streamed outputs.", _SECONDS)
        self.per_token = self._histogram("request_time_per_output_token_seconds", "After the first token.", _SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens generated for a prompt.", _TOKENS)
        self.max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.n = self._histogram("request_params_n", "n asked for.", _COUNTS)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"deltaic:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        return family.labels(self._model_name)

    def count_end(self, reason: str, count: int = 1) -> None:
        self._success.labels(self._model_name, reason).inc(count)

    def observer(self, inputs: Sequence[EngineInput]) -> RequestObserver:
        return RequestObserver(self, inputs)

    def render(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestObserver:
    """Count the outputs of one HTTP request."""

    def __init__(self, metrics: ServerMetrics, inputs: Sequence[EngineInput]) -> None:
        self._metrics = metrics
        self._num_unfinished = sum(given.sampling_params.n for given in inputs)
        self._last_token_times: dict[int, float] = {}
        for given in inputs:
            metrics.n.observe(given.sampling_params.n)
            metrics.prompt_tokens.observe(len(given.prompt_token_ids))
            if given.sampling_params.max_tokens is not None:
                metrics.max_tokens.observe(min(given.sampling_params.max_tokens, _MOST_TOKENS))

    def observe(self, index: int, output: RequestOutput) -> None:
        """Take an output of the prompt `index`."""
        times = output.metrics
        if times is not None and times.first_token_time is not None and times.last_token_time is not None:
            last = self._last_token_times.get(index)
            if last is None:
                self._metrics.time_to_first_token.observe(times.first_token_time - times.arrival_time)
            elif times.last_token_time > last:
                self._metrics.inter_token.observe(times.last_token_time - last)
            self._last_token_times[index] = times.last_token_time
            if output.finished:
                self._metrics.latency.observe(times.last_token_time - times.arrival_time)
                self._metrics.generation_tokens.observe(times.num_generation_tokens)
                if times.tokens_per_second:
                    self._metrics.per_token.observe(1 / times.tokens_per_second)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._num_unfinished -= 1
                self._metrics.count_end(completion.finish_reason)

    def end(self, reason: str) -> None:
        """Count what has not ended as ended for this reason."""
        if self._num_unfinished:
            self._metrics.count_end(reason, self._num_unfinished)
            self._num_unfinished = 0
