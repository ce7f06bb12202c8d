"""/v1/models: what this server has."""

from __future__ import annotations

from fastapi import APIRouter

from deltaic.server.protocol import ModelCard, ModelList
from deltaic.server.serving import Serving


def models_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name, created=serving.started, root=serving.model_name, max_model_len=serving.llm.max_model_len
        )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card(name) for name in serving.model_names])

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        serving.check_model(name)
        return card(name)

    return router
