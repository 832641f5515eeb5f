"""Fields of both interfaces are tested at and about their bounds, absent, and of every wrong type."""

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serve_app.domain.requests import GenerationRequest, UpscaleRequest, Variant, image_seeds
from tests.api.app import ACCEPTED, BODIES, Member, TestService, error_of
from tests.made_jobs import generation_of, job_of

A, B = Variant.A, Variant.B
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"

NOT_TEXT = [None, True, False, 0, 1, 1.5, [], ["x"], {}, {"x": 1}]
NOT_NUMBERS = [None, True, False, "", "1", "7.5", "512", [], [1], {}, {"x": 1}]


@dataclass(frozen=True, slots=True)
class Numeric:
    """A numeric field: what is let through, what is not, and the range its message names."""

    variant: Variant
    name: str
    good: tuple[float, ...]
    bad: tuple[float, ...]
    range: str


NUMERIC = (
    Numeric(
        A,
        "lora_weight",
        (0.1, 0.11, 0.75, 0.99, 1, 1.0),
        (0.09, 0.0999999, 1.0000001, 1.1, 0, -1, 1e300),
        "between 0.1 and 1.0",
    ),
    *(
        Numeric(A, side, (512, 768, 512.0, 768.0), (511, 513, 640, 767, 769, 0, -512, 1024, 512.5), "512 or 768")
        for side in ("width", "height")
    ),
    Numeric(A, "num_images", (1, 2, 3, 4, 1.0, 4.0), (0, 5, -1, 1.5, 4.0001, 10**30), "between 1 and 4"),
    Numeric(
        A, "guidance_scale", (1, 1.0, 1.01, 7.5, 19.99, 20, 20.0), (0.99, 0, 20.01, 21, -1, 10**400), "between 1 and 20"
    ),
    Numeric(A, "steps", (20, 21, 35, 49, 50, 20.0), (19, 51, 0, -20, 20.5, 10**18), "between 20 and 50"),
    Numeric(B, "lora_weight", (0, 0.0, -0.0, 0.01, 0.75, 1.99, 2, 2.0), (-0.01, -1, 2.01, 3, 1e300), "between 0 and 2"),
    Numeric(B, "guidance", (1, 1.0, 1.01, 7.5, 19.99, 20, 20.0), (0.99, 0, 20.01, 21, -1, 10**400), "between 1 and 20"),
    *(
        Numeric(
            B,
            side,
            (256, 264, 512, 640.0, 1016, 1024),
            (255, 248, 257, 1025, 1032, 0, -512, 512.5, 10**30),
            "256 and 1024",
        )
        for side in ("width", "height")
    ),
)
TEXT = (
    (A, "prompt", "1 to 4000"),
    (A, "lora_id", "1 to 128"),
    (B, "positive_prompt", "1 to 4000"),
    (B, "negative_prompt", "4000"),
    (B, "model_id", "1 to 128"),
)
DEFAULTS = {
    "lora_weight": 0.75,
    "width": 512,
    "height": 512,
    "num_images": 1,
    "guidance_scale": 7.5,
    "steps": 30,
    "negative_prompt": "",
}

Post = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
def post(service: TestService, regular: Member) -> Post:
    async def ask(variant: Variant, **fields: Any) -> httpx.Response:
        return await service.generate(regular, variant, **fields)

    return ask


@pytest.fixture
def upscale(service: TestService, regular: Member) -> Post:
    async def ask(**fields: Any) -> httpx.Response:
        return await service.client.post("/v1/upscale", json=fields, headers=regular.a)

    return ask


async def accepted(service: TestService, answer: httpx.Response) -> GenerationRequest:
    """The request that was recorded for an acknowledgement."""
    assert answer.status_code in ACCEPTED.values(), answer.text
    acknowledged = answer.json()
    return await generation_of(service.resources, acknowledged.get("request_id") or acknowledged["run_id"])


def is_refusal(answer: httpx.Response, name: str, words: str) -> bool:
    """Return whether the answer refuses this field with these words, as any other error is answered."""
    if answer.status_code != 400:
        return False
    error = error_of(answer)
    return (
        error["code"] == "invalid_parameter" and re.match(f"{name}: .*{re.escape(words)}", error["message"]) is not None
    )


def names(answer: httpx.Response, name: str, words: str = "") -> None:
    assert is_refusal(answer, name, words), answer.text


async def taken(post: Post, variant: Variant, name: str, values: Iterable[object], words: str) -> dict[str, str]:
    """Send each value for a field, and return what is answered to those that are not refused by it with these words."""
    answers = {ascii(value)[:80]: await post(variant, **{name: value}) for value in values}
    return {value: answer.text for value, answer in answers.items() if not is_refusal(answer, name, words)}


numeric = pytest.mark.parametrize("row", NUMERIC, ids=lambda row: f"{row.variant}-{row.name}")
RECORDED = {"guidance": "guidance_scale"}


@numeric
async def test_a_number_within_its_range_is_recorded_as_sent(service: TestService, post: Post, row: Numeric) -> None:
    for value in row.good:
        request = await accepted(service, await post(row.variant, **{row.name: value}))
        assert getattr(request, RECORDED.get(row.name, row.name)) == value


@numeric
async def test_anything_but_a_number_in_the_range_is_refused_with_the_range(post: Post, row: Numeric) -> None:
    assert await taken(post, row.variant, row.name, (*row.bad, *NOT_NUMBERS), row.range) == {}


@pytest.mark.parametrize(("variant", "name", "words"), TEXT)
async def test_a_text_field_takes_nothing_but_text(post: Post, variant: Variant, name: str, words: str) -> None:
    assert await taken(post, variant, name, NOT_TEXT, words) == {}


@pytest.mark.parametrize("variant", Variant)
async def test_a_seed_takes_nothing_but_integers(post: Post, variant: Variant) -> None:
    assert await taken(post, variant, "seed", (None, True, False, "1", "", 1.5, 0.1, [], {}), "integer") == {}


@pytest.mark.parametrize(("variant", "name"), [(A, "prompt"), (A, "lora_id"), (B, "positive_prompt"), (B, "model_id")])
async def test_a_required_field_cannot_be_left_out(
    service: TestService, regular: Member, variant: Variant, name: str
) -> None:
    body = {key: value for key, value in BODIES[variant].items() if key != name}
    answer = await service.client.post("/v1/generate", json=body, headers=regular.headers(variant))
    names(answer, name, "is required")


@pytest.mark.parametrize("variant", Variant)
async def test_what_is_left_out_gets_its_default(service: TestService, post: Post, variant: Variant) -> None:
    request = await accepted(service, await post(variant))
    assert {name: getattr(request, name) for name in DEFAULTS} == DEFAULTS
    assert len(request.seeds) == 1
    assert 0 <= request.seeds[0] < 2**53


PROMPTS = [(A, "prompt"), (B, "positive_prompt"), (B, "negative_prompt")]


@pytest.mark.parametrize(
    "text",
    ["x", "x" * 4000, "é" * 4000, "\U0001f600" * 4000, " " * 90 + "x" * 4000 + "\n\n", "a\x1cb", "\x1c"],
    ids=lambda text: f"{len(text)}",
)
@pytest.mark.parametrize(("variant", "name"), PROMPTS)
async def test_a_prompt_of_up_to_4000_characters_is_kept_whole(
    service: TestService, post: Post, variant: Variant, name: str, text: str
) -> None:
    request = await accepted(service, await post(variant, **{name: text}))
    assert (request.negative_prompt if name == "negative_prompt" else request.prompt) == text.strip(" \n")


@pytest.mark.parametrize("text", ["x" * 4001, "\U0001f600" * 4001, " x" * 2000 + "xx"], ids=lambda text: f"{len(text)}")
@pytest.mark.parametrize(("variant", "name"), PROMPTS)
async def test_a_prompt_over_4000_characters_is_refused_not_cut(
    post: Post, variant: Variant, name: str, text: str
) -> None:
    names(await post(variant, **{name: text}), name, "4000")


@pytest.mark.parametrize(("variant", "name"), PROMPTS[:2])
async def test_a_prompt_of_white_space_is_empty(post: Post, variant: Variant, name: str) -> None:
    assert await taken(post, variant, name, ("", *WHITE_SPACE, WHITE_SPACE), "1 to 4000") == {}


async def test_a_negative_prompt_of_white_space_is_no_negative_prompt(service: TestService, post: Post) -> None:
    request = await accepted(service, await post(B, negative_prompt=WHITE_SPACE))
    assert request.negative_prompt == ""


@pytest.mark.parametrize("text", ["", "x" * 129], ids=len)
@pytest.mark.parametrize(("variant", "name"), [(A, "lora_id"), (B, "model_id")])
async def test_a_catalog_id_has_1_to_128_characters(post: Post, variant: Variant, name: str, text: str) -> None:
    names(await post(variant, **{name: text}), name, "1 to 128")


SEEDS = [0, -1, 1, 42, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**80), 10**4299, -(10**4299), 10**4300 - 1]


@pytest.mark.parametrize(
    "seed", SEEDS, ids=lambda seed: f"{seed:.3e}" if abs(seed) < 10**300 else f"{len(str(seed))} digits"
)
@pytest.mark.parametrize("variant", Variant)
async def test_any_integer_is_a_seed(service: TestService, post: Post, variant: Variant, seed: int) -> None:
    request = await accepted(service, await post(variant, seed=seed))
    assert request.seeds == image_seeds(seed, 1)


async def test_image_i_takes_seed_plus_i(service: TestService, post: Post) -> None:
    request = await accepted(service, await post(A, seed=2**64 - 2, num_images=4))
    assert request.seeds == tuple(image_seeds(2**64 - 2 + i, 1)[0] for i in range(4))


@pytest.mark.parametrize("spelling", ["7", "7.0", "70e-1", "0.7E1", "7.000"])
@pytest.mark.parametrize("variant", Variant)
async def test_a_whole_number_is_an_integer_however_it_is_spelled(
    service: TestService, regular: Member, variant: Variant, spelling: str
) -> None:
    text = json.dumps(BODIES[variant])[:-1] + f', "seed": {spelling}}}'
    answer = await service.client.post("/v1/generate", content=text, headers=regular.headers(variant))
    assert (await accepted(service, answer)).seeds == (7,)


async def test_a_number_nearer_to_zero_than_any_float_is_zero(service: TestService, regular: Member) -> None:
    text = json.dumps(BODIES[B])[:-1] + ', "lora_weight": 1e-99999999999999999999}'
    answer = await service.client.post("/v1/generate", content=text, headers=regular.headers(B))
    assert (await accepted(service, answer)).lora_weight == 0


@pytest.mark.parametrize(
    ("variant", "name", "hint"),
    [
        (A, "num_image", "did you mean num_images?"),
        (A, "Prompt", "did you mean prompt?"),
        (A, "guidance_scal", "did you mean guidance_scale?"),
        (A, "xyz", "the fields are prompt, lora_id"),
        (B, "negative_promt", "did you mean negative_prompt?"),
        (B, "guidence", "did you mean guidance?"),
        (B, "n", "the fields are positive_prompt"),
        (A, "positive_prompt", "belongs to the X-API-Key interface; with a bearer key send `prompt`"),
        (A, "model_id", "belongs to the X-API-Key interface; with a bearer key send `lora_id`"),
        (A, "guidance", "belongs to the X-API-Key interface; with a bearer key send `guidance_scale`"),
        (A, "negative_prompt", "the bearer interface has no such field"),
        (B, "prompt", "belongs to the bearer interface; with X-API-Key send `positive_prompt`"),
        (B, "lora_id", "belongs to the bearer interface; with X-API-Key send `model_id`"),
        (B, "guidance_scale", "belongs to the bearer interface; with X-API-Key send `guidance`"),
        (B, "num_images", "belongs to the bearer interface; with X-API-Key each run makes one image"),
        (B, "steps", "the X-API-Key interface has no such field"),
    ],
)
async def test_a_field_that_the_interface_does_not_have_is_refused_with_a_hint(
    post: Post, variant: Variant, name: str, hint: str
) -> None:
    names(await post(variant, **{name: 1}), name, hint)


@pytest.mark.parametrize(
    "name", ["", "x" * 1000, "<script>", "a b", "\u2028", "\u00e9", "a\nb"], ids=lambda name: ascii(name)[:12]
)
@pytest.mark.parametrize("variant", Variant)
async def test_an_odd_unknown_name_is_refused_and_not_echoed(post: Post, variant: Variant, name: str) -> None:
    answer = await post(variant, **{name: 1})
    names(answer, "body", "unknown field")
    assert len(name) < 2 or name not in answer.text
    assert len(answer.content) < 1000


async def test_a_body_of_thousands_of_unknown_fields_gets_a_short_answer(post: Post) -> None:
    answer = await post(A, **{f"f{i}": 0 for i in range(5000)})
    names(answer, "f0")
    assert len(answer.content) < 2000


async def test_several_faults_are_all_named(post: Post) -> None:
    assert error_of(await post(B, guidance=21))["message"] == "guidance: must be between 1 and 20", "as documented"
    message = error_of(await post(A, steps=10, guidance_scale=21, width="x"))["message"]
    assert message == (
        "width: must be 512 or 768; guidance_scale: must be between 1 and 20; steps: must be between 20 and 50"
    )


async def test_the_input_is_not_echoed(post: Post) -> None:
    answer = await post(A, prompt="canary" * 1000, lora_id="canary" * 100, steps="canary")
    assert answer.status_code == 400
    assert "canary" not in answer.text


@pytest.fixture(scope="session")
async def image_id(service: TestService, regular: Member) -> str:
    return await service.completed_image(regular)


@pytest.mark.parametrize("value", [2, 4, 2.0, 4.0, ...], ids=str)
async def test_a_scale_factor_of_2_or_4_is_taken(
    service: TestService, upscale: Post, image_id: str, value: object
) -> None:
    answer = await upscale(image_id=image_id, **({} if value is ... else {"scale_factor": value}))
    assert answer.status_code == 202, answer.text
    job = await job_of(service.resources, answer.json()["request_id"])
    assert isinstance(job.request, UpscaleRequest)
    assert job.request.scale_factor == (2 if value is ... else value)


async def test_no_other_scale_factor_and_no_image_id_but_a_text_is_taken(upscale: Post, image_id: str) -> None:
    for value in (0, 1, 3, 5, 8, -2, 2.5, 10**30, *NOT_NUMBERS):
        names(await upscale(image_id=image_id, scale_factor=value), "scale_factor", "2 or 4")
    for value in (*NOT_TEXT, "", "x" * 129):
        names(await upscale(image_id=value), "image_id", "1 to 128")


async def test_an_upscale_needs_an_image_id_and_has_no_other_fields(upscale: Post) -> None:
    names(await upscale(), "image_id", "is required")
    names(await upscale(image_id="img_x", scale=2), "scale", "did you mean scale_factor?")


@pytest.mark.slow
async def test_an_output_over_16_megapixels_is_refused_with_the_limit(
    service: TestService, regular: Member, upscale: Post
) -> None:
    small = await service.completed_image(regular, width=768, height=768)
    answer = await upscale(image_id=small, scale_factor=4)
    larger = (await service.complete(answer.json()["request_id"])).images[0]
    assert (larger.width, larger.height) == (3072, 3072)
    for factor in (2, 4):
        names(await upscale(image_id=larger.image_id, scale_factor=factor), "scale_factor", "16 megapixels")
