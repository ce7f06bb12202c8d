"""What became of the drafts."""

from __future__ import annotations


class DraftStats:
    """Counters of speculative decoding since the engine was made."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_drafts = 0  # times that drafts of a request were verified
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * num_speculative_tokens  # of the drafts at each position of a chain

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verification: the first num_accepted of its drafts were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1

    def figures(self) -> dict[str, int | float]:
        """Return all counters by name."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_mean_accepted_length": self.mean_accepted_length,
            **{f"spec_decode_num_accepted_tokens_pos_{i}": count for i, count in enumerate(self.num_accepted_at)},
        }

    @property
    def mean_accepted_length(self) -> float:
        """Return the tokens that a verification gives on average, with the one that is no draft; 0 before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0
