"""Random lengths of prompts and answers."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RandomRequest:
    prompt_len: int
    output_len: int


DATASETS = ("random",)


def check_dataset(name: str) -> None:
    """Raise ValueError for a kind of prompts that there is none of: others than random need files and a tokenizer."""
    if name not in DATASETS:
        raise ValueError(f"dataset_name must be {', '.join(DATASETS)}: prompts of random tokens, got {name!r:.80}")


def random_requests(
    num_prompts: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[RandomRequest]:
    """Return lengths drawn evenly from [len x (1 - ratio), len x (1 + ratio)], at least 1."""
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {range_ratio}")
    rng = random.Random(seed)

    def draw(length: int) -> int:
        return rng.randint(max(1, round(length * (1 - range_ratio))), max(1, round(length * (1 + range_ratio))))

    return [RandomRequest(draw(input_len), draw(output_len)) for _ in range(num_prompts)]
