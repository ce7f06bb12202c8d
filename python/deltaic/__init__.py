"""A native inference engine for hybrid language models: Gated DeltaNet and full attention."""

from deltaic._core import __version__

__all__ = ["__version__"]
