"""Figures for Prometheus, under vLLM's names with the prefix deltaic:."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaic.async_llm import AsyncLLM
from deltaic.input_processor import EngineInput
from deltaic.outputs import RequestMetrics, RequestOutput
from deltaic.step_sizes import BOUNDS

_LABELS = ["model_name", "engine"]
_ENGINE = "0"  # vLLM numbers the replicas behind a server
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_COUNTS = (1, 2, 5, 10, 20)


class _EngineCollector(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name, _ENGINE]

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
            ("spec_decode_num_drafts", "Times that drafts were verified.", stats.drafts.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafts.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that were right.", stats.drafts.num_accepted_tokens),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"deltaic:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"deltaic:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        accepted = CounterMetricFamily(
            "deltaic:spec_decode_num_accepted_tokens_per_pos", "By place in a chain.", labels=[*_LABELS, "position"]
        )
        for position, count in enumerate(stats.drafts.num_accepted_at):
            accepted.add_metric([*self._labels, str(position)], count)
        yield accepted
        yield self._step_sizes()
        yield self._cache_config(stats.num_total_blocks)

    def _step_sizes(self) -> Metric:
        sizes, total, buckets = self._llm.step_sizes, 0, []
        for bound, count in zip([*BOUNDS, "+Inf"], sizes.counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        family = HistogramMetricFamily("deltaic:iteration_tokens_total", "Tokens of a step.", labels=_LABELS)
        family.add_metric(self._labels, buckets, float(sizes.num_tokens))
        return family

    def _cache_config(self, num_blocks: int) -> Metric:
        config = self._llm.scheduler_config
        info = {
            "block_size": config.block_size,
            "mamba_block_size": config.mamba_block_size,
            "num_gpu_blocks": num_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        family = GaugeMetricFamily("deltaic:cache_config_info", "Sizes of the caches.", labels=[*_LABELS, *info])
        family.add_metric([*self._labels, *map(str, info.values())], 1)
        return family


class ServerMetrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm, model_name))
        self._model_name = model_name
        self._success = Counter(
            "deltaic:request_success",
            "Completions that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        cached = Counter(
            "deltaic:prompt_tokens_cached",
            "Prompt tokens of ended requests that the prefix cache had.",
            _LABELS,
            registry=self.registry,
        )
        self.cached_tokens = cached.labels(model_name, _ENGINE)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival.", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between streamed outputs.", _SECONDS)
        self.output_token = self._histogram("time_per_output_token_seconds", "The same, by its older name.", _SECONDS)
        self.per_token = self._histogram("request_time_per_output_token_seconds", "After the first token.", _SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", "From there to the first token.", _SECONDS)
        self.decode = self._histogram("request_decode_time_seconds", "From there to the last token.", _SECONDS)
        self.inference = self._histogram("request_inference_time_seconds", "From the first step on.", _SECONDS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens generated for a prompt.", _TOKENS)
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Of a prompt's longest completion.", _TOKENS
        )
        self.computed = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens not cached.", _TOKENS)
        self.max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.n = self._histogram("request_params_n", "n asked for.", _COUNTS)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"deltaic:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self._model_name, _ENGINE)

    def count_end(self, reason: str, count: int = 1) -> None:
        self._success.labels(self._model_name, _ENGINE, reason).inc(count)

    def observer(self, inputs: Sequence[EngineInput]) -> RequestObserver:
        return RequestObserver(self, inputs)


class RequestObserver:
    """Count the outputs of one HTTP request."""

    def __init__(self, metrics: ServerMetrics, inputs: Sequence[EngineInput]) -> None:
        self._metrics = metrics
        self._num_unfinished = sum(given.sampling_params.n for given in inputs)
        self._last_token_times: dict[int, float] = {}
        self._num_tokens: dict[int, dict[int, int]] = {}  # prompt -> completion -> tokens generated
        for given in inputs:
            metrics.n.observe(given.sampling_params.n)
            metrics.prompt_tokens.observe(len(given.prompt_token_ids))
            if given.sampling_params.max_tokens is not None:
                metrics.max_tokens.observe(given.sampling_params.max_tokens)

    def observe(self, index: int, output: RequestOutput) -> None:
        """Take an output of the prompt `index`."""
        times = output.metrics
        if times is not None and times.first_token_time is not None and times.last_token_time is not None:
            last = self._last_token_times.get(index)
            if last is None:
                self._metrics.time_to_first_token.observe(times.first_token_time - times.arrival_time)
            elif times.last_token_time > last:
                self._metrics.inter_token.observe(times.last_token_time - last)
                self._metrics.output_token.observe(times.last_token_time - last)
            self._last_token_times[index] = times.last_token_time
        counts = self._num_tokens.setdefault(index, {})
        for completion in output.outputs:
            counts[completion.index] = counts.get(completion.index, 0) + len(completion.token_ids)
            if completion.finish_reason is not None:
                self._num_unfinished -= 1
                self._metrics.count_end(completion.finish_reason)
        if output.finished and times is not None:
            metrics = self._metrics
            metrics.generation_tokens.observe(times.num_generation_tokens)
            metrics.longest.observe(max(counts.values()))
            num_cached = output.num_cached_tokens or 0
            metrics.cached_tokens.inc(num_cached)
            metrics.computed.observe(len(output.prompt_token_ids) - num_cached)
            self._observe_times(times)

    def _observe_times(self, times: RequestMetrics) -> None:
        """Take the times of a prompt whose completions have ended."""
        first, last, scheduled = times.first_token_time, times.last_token_time, times.scheduled_time
        if first is None or last is None:
            return  # ended without a token
        metrics = self._metrics
        metrics.latency.observe(last - times.arrival_time)
        metrics.decode.observe(last - first)
        if times.tokens_per_second:
            metrics.per_token.observe(1 / times.tokens_per_second)
        if scheduled is not None:
            metrics.queue.observe(scheduled - times.arrival_time)
            metrics.prefill.observe(first - scheduled)
            metrics.inference.observe(last - scheduled)

    def end(self, reason: str) -> None:
        """Count what has not ended as ended for this reason."""
        if self._num_unfinished:
            self._metrics.count_end(reason, self._num_unfinished)
            self._num_unfinished = 0
