"""What a user may set about a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises ValueError naming the field."""

    served_model_names: Sequence[str] = ()  # the first is the one that answers carry; none: the model's folder's name
    api_keys: Sequence[str] = ()  # none: no key is asked for
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys"):
            if any(not value or not value.isascii() or not value.isprintable() for value in getattr(self, name)):
                raise ValueError(f"{name} must be printable ASCII and not empty")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
