"""/v1/models: what this server has."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import APIRouter

from deltaic.server.errors import ApiError
from deltaic.server.protocol import ModelCard, ModelList
from deltaic.server.settings import ServerSettings


class ServedModel:
    """A model under the names that clients know it by."""

    def __init__(self, settings: ServerSettings, folder: Path, max_model_len: int) -> None:
        self.model_names = list(settings.served_model_names) or [folder.name]
        self.max_model_len = max_model_len
        self.started = int(time.time())

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise the 404 of a model that this server does not have."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist; this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    def card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self.started, root=self.model_name, max_model_len=self.max_model_len)


def models_router(served: ServedModel) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[served.card(name) for name in served.model_names])

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        served.check_model(name)
        return served.card(name)

    return router
