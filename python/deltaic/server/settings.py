"""What a user may set about a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltaic.engine_config import check_integer

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_CONCURRENT_REQUESTS = 2048


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises ValueError naming the field."""

    served_model_names: Sequence[str] = ()  # the first is the one that answers carry; none: the model's folder's name
    api_keys: Sequence[str] = ()  # none: no key is asked for
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_concurrent_requests: int = DEFAULT_MAX_CONCURRENT_REQUESTS  # read or answered at once

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of strings, got one string")
            if any(not value or not value.isascii() or not value.isprintable() for value in getattr(self, name)):
                raise ValueError(f"{name} must be printable ASCII and not empty")
        if any(key != key.strip() for key in self.api_keys):
            raise ValueError("api_keys must be without spaces around them, which no header carries")
        for name in ("max_body_bytes", "max_concurrent_requests"):
            check_integer(name, getattr(self, name), 1)
