"""An HTTP server with the interface of OpenAI's, over AsyncLLM. Needs the extra `serve`."""

from deltaic.server.app import create_app
from deltaic.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
