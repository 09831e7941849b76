"""GET /v1/models and /v1/models/{id}."""

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.responses import ModelCard, ModelList


async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return json_response(ModelList(data=[_card(context_of(request))]))


async def show_model(request: Request) -> Response:
    """One model; 404 for any other than the served one."""
    context = context_of(request)
    context.check_model(request.path_params["model"])
    return json_response(_card(context))


def _card(context: ServerContext) -> ModelCard:
    config = context.llm.config
    return ModelCard(
        id=config.served_name,
        created=context.started_at,
        max_model_len=context.llm.max_model_len,
        recipe=config.recipe,
        profile=config.profile,
    )
