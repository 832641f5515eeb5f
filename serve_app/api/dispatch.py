"""`POST /v1/generate` belongs to both contracts: the credential header decides which room answers, never the body."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api import answers, credentials
from serve_app.api.door import Endpoint
from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant

BOTH_CHALLENGES = 'Bearer realm="atelier", ApiKey realm="atelier"'


def shared_route(generate_a: Endpoint, generate_b: Endpoint) -> Route:
    async def generate(request: Request) -> Response:
        try:
            variant = credentials.spoken_variant(request.headers)
        except Unauthorized as error:
            return answers.refusal(401, error.code, error.message, {"WWW-Authenticate": BOTH_CHALLENGES})
        except AmbiguousCredentials as error:
            return answers.refusal(400, error.code, error.message)
        return await (generate_a(request) if variant is Variant.A else generate_b(request))

    return Route("/v1/generate", generate, methods=["POST"])
