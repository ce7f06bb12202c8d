"""What bounds a server: the costs of its model against the ceilings of its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaic import _core
from deltaic.bench.ceilings import Ceilings, find_ceilings, measure_again
from deltaic.bench.http_client import Url
from deltaic.bench.load import Answer
from deltaic.bench.report import percentile
from deltaic.checkpoint import weight_file_bytes
from deltaic.device import DTYPE_BYTES, place
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import matrix_dtype
from deltaic.model_costs import ModelCosts

_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(slots=True)
class ServerBound:
    """A model's costs and a device's ceilings, which are measured again where that was disturbed."""

    costs: ModelCosts
    ceilings: Ceilings
    num_threads: int = 0

    @staticmethod
    def find(
        path: Path, config: EngineConfig, server: Url, *, bandwidth: float | None, flops: float | None
    ) -> ServerBound:
        """Read a model's shapes, from a checkpoint folder or a config.json, and find the ceilings of its device.

        ValueError when the server is on another machine, whose ceilings cannot be measured here and are not given.
        """
        if server.host not in _HERE and (bandwidth is None or flops is None):
            raise ValueError(
                f"model_config: the server is on {server.host}: give --bandwidth and --flops of its device too"
            )
        model = _core.load_model_config(path)
        placement = place(model, config)
        weight_bytes: float = DTYPE_BYTES[matrix_dtype(model, placement)]
        if not placement.is_cuda and (file_bytes := weight_file_bytes(path)):
            weight_bytes = file_bytes / model.num_parameters()
        ceilings = find_ceilings(placement, bandwidth=bandwidth, flops=flops, num_threads=config.num_threads)
        return ServerBound(ModelCosts(model, placement, weight_bytes), ceilings, config.num_threads)

    def settle(self) -> None:
        """Measure again what was measured while other processes ran; the server must have nothing to do."""
        self.ceilings = measure_again(self.ceilings, self.num_threads)

    def shares(self, answers: Sequence[Answer], duration: float, most_at_once: int) -> dict[str, Any]:
        """Return the least times for what was answered, and the shares of them that were reached.

        For a first token: of the prompt alone, without what the cache had. For a token after it: of a step with as
        many requests as decoded at once on average. For the whole: all prompts at the peak, then full steps.
        """
        good = [answer for answer in answers if answer.succeeded]
        if not good:
            return {}
        limits = self.ceilings.bytes_per_second, self.ceilings.flops_per_second
        prefills = [self.costs.prefill(max(answer.prompt_len - answer.cached_len, 1)) for answer in good]
        ttft = percentile([cost.seconds(*limits) for cost in prefills], 50)
        context = sum(answer.prompt_len + answer.output_len / 2 for answer in good) / len(good)
        num_decoding = max(sum(answer.latency - answer.ttft for answer in good) / duration, 1.0)
        tpot = self.costs.decode_step(round(num_decoding), context).seconds(*limits)
        num_decode_tokens = sum(answer.output_len - 1 for answer in good)
        full_step = self.costs.decode_step(most_at_once, context).seconds(*limits)
        whole = sum(cost.num_flops for cost in prefills) / self.ceilings.flops_per_second
        whole += num_decode_tokens / most_at_once * full_step
        tpots = [answer.tpot for answer in good if answer.tpot is not None]
        return {
            "bound_ttft_ms": 1e3 * ttft,
            "ttft_share_of_bound": ttft / percentile([answer.ttft for answer in good], 50),
            "bound_tpot_ms": 1e3 * tpot,
            "tpot_share_of_bound": tpot / percentile(tpots, 50) if tpots and percentile(tpots, 50) else None,
            "bound_duration": whole,
            "share_of_bound": whole / duration,
        }
