"""`atelier mcp`: an MCP server on standard input and output, which lets an assistant draw with a running service.

It is a caller like any other: the SDK finds the service and the key, and of the service's packages it needs none.
"""

import asyncio
import sys
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any, Literal

from anyio import CancelScope

from serve_app.client import AsyncClient, AsyncImage, AsyncJob, AtelierClientError

NOT_INSTALLED = 2
_INSTRUCTIONS = (
    "Draws images from a prompt, with any of the LoRAs that list_loras names. Each image comes with an id that upscale "
    "takes, and an address that opens in a browser."
)


def main() -> None:
    """Serve until standard input ends."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver import Context, Image
        from mcp.server.mcpserver.exceptions import ToolError
        from pydantic import Field
    except ModuleNotFoundError as error:
        sys.stderr.write(f"atelier mcp: there is no {error.name}: `pip install '.[mcp]'` in a checkout\n")
        sys.exit(NOT_INSTALLED)

    @contextmanager
    def told() -> Generator[None]:
        """Tell the assistant in words what went wrong."""
        try:
            yield
        except (AtelierClientError, ValueError, TypeError) as error:
            raise ToolError(str(error)) from error

    @contextmanager
    def uncancelable() -> Generator[None]:
        """Finish what the block does before the call is canceled."""
        with CancelScope(shield=True):
            yield

    async def ended(starting: Awaitable[AsyncJob], context: Context[Any, Any]) -> AsyncJob:
        """Return the job once it has ended; an assistant that gives the call up, or has gone, cancels it."""
        with uncancelable():  # or the service would draw a job whose id nobody has
            job = await starting
        told_of = -1
        try:
            async for event in job.events():
                if event.progress > told_of:
                    told_of = event.progress
                    await context.report_progress(told_of, 100, event.status)
            return await job.wait()
        except asyncio.CancelledError:
            with uncancelable():
                await job.cancel()
            raise

    async def shown(image: AsyncImage) -> list[Any]:
        png = await image.download()
        return [Image(data=png, format="png"), f"{image.image_id}, {image.caption}: {image.url}"]

    server = MCPServer("atelier", instructions=_INSTRUCTIONS, version=version("atelier"), log_level="WARNING")

    @server.tool(structured_output=False)
    async def generate(
        context: Context[Any, Any],
        prompt: str,
        loras: Annotated[
            dict[str, float] | None, Field(description="Names of list_loras with weights of -2 to 2, usually 0.5 to 1")
        ] = None,
        width: Annotated[int | None, Field(description="Pixels, a multiple of 8")] = None,
        height: Annotated[int | None, Field(description="Pixels, a multiple of 8")] = None,
        seed: Annotated[int | None, Field(description="The same seed draws the same image again")] = None,
    ) -> list[Any]:
        """Draw an image of the prompt."""
        with told():
            async with AsyncClient() as client:
                started = client.generate(prompt, loras=loras, width=width, height=height, seed=seed, wait=False)
                return await shown((await ended(started, context)).images[0])

    @server.tool(structured_output=False)
    async def upscale(context: Context[Any, Any], image_id: str, scale_factor: Literal[2, 4] = 2) -> list[Any]:
        """Enlarge an image that generate drew, by its id."""
        with told():
            async with AsyncClient() as client:
                return await shown((await ended(client.upscale(image_id, scale_factor), context)).images[0])

    @server.tool()
    async def list_loras() -> list[dict[str, Any]]:
        """List the LoRAs that generate takes, with the words that a prompt should hold for each."""
        with told():
            async with AsyncClient() as client:
                return [
                    {
                        "name": lora.name,
                        "description": lora.description,
                        "trigger_words": list(lora.trigger_words),
                        "base_model": lora.base_model,
                    }
                    for lora in await client.loras.list()
                ]

    server.run("stdio")
