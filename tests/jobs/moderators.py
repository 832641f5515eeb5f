"""Functions that a setting may name as moderation."""

import asyncio


def refuses_boats(question: dict[str, str]) -> dict[str, object]:
    return {"allowed": "boat" not in question.get("prompt", ""), "reason": "no boats"}


async def refuses_images(question: dict[str, str]) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"allowed": question["stage"] == "prompt", "reason": "no images"}


def breaks(question: dict[str, str]) -> dict[str, object]:
    raise RuntimeError(f"cannot read {question['prompt']}")
