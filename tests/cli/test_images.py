"""What an account's commands do over real HTTP, with the local service's key or a given one."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from serve_app.domain.requests import LoraUse, Variant
from tests.cli.conftest import Atelier
from tests.live import Live
from tests.made_jobs import generation_of
from tests.support import PRIVATE_ADAPTER, adapter_id, adapter_of


@pytest.mark.slow
def test_an_image_by_the_adapters_name(atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    ended = atelier("generate", "a lighthouse", "--lora", "outline", "--seed", "7", "--width", "768", "--out", str(out))
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{out}  img_")
    assert len(ended.out.splitlines()) == 1, "the progress bar is on stderr"
    assert "The base model has never read: lighthouse." in ended.err
    with Image.open(out) as picture:
        assert picture.size == (768, 512)


@pytest.mark.slow
def test_all_that_can_be_asked_for_has_a_word(atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.new("RGB", (256, 256), "white").save(picture)
    words = (
        "--lora", "outline=-0.5", "--lora", "neon", "--weight", "0.4", "--sampler", "euler", "--base-model", "pocket",
        "--image", str(picture), "--strength", "0.5", "--mask", str(picture), "--prompt-weights", "--format", "webp",
        "--steps", "9", "--guidance-start", "0.25", "--guidance-end", "0.5", "--out", str(tmp_path / "x.webp"),
    )  # fmt: skip
    made = atelier.json("generate", "a (red:1.2) boat", *words)
    request = live.run(generation_of(live.resources, made["id"]))
    assert request.loras == (LoraUse(adapter_id("outline"), -0.5), LoraUse(adapter_id("neon"), 0.4))
    assert (request.sampler, request.steps, request.prompt_weights, request.output_format) == ("euler", 9, True, "webp")
    assert request.image
    assert request.image == request.mask
    assert (request.strength, request.guidance_start, request.guidance_end) == (0.5, 0.25, 0.5)
    alone = atelier.json("generate", "a boat", "--out", str(tmp_path / "y.png"))
    assert live.run(generation_of(live.resources, alone["id"])).loras == ()
    assert atelier.json("upscale", str(picture), "--out", str(tmp_path / "z.png"))["images"][0]["width"] == 512


@pytest.mark.slow
def test_several_images_are_numbered_and_can_be_upscaled(
    atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path
) -> None:
    words = ("--lora", adapter_id("outline"), "--num-images", "2", "--out", str(tmp_path / "x.png"))
    made = atelier.json("generate", "a lighthouse", *words)
    assert [image["file"] for image in made["images"]] == [str(tmp_path / f"x-{number}.png") for number in (1, 2)]
    larger = atelier.json("upscale", made["images"][0]["image_id"], "--factor", "2", "--out", str(tmp_path / "big.png"))
    assert larger["id"].startswith("up_")
    with Image.open(tmp_path / "big.png") as picture:
        assert picture.size == (1024, 1024)
    for name, asked in (("x.webp", "WEBP"), ("x.JPG", "JPEG")):
        atelier.json("upscale", made["images"][0]["image_id"], "--out", str(tmp_path / name))
        with Image.open(tmp_path / name) as picture:
            assert picture.format == asked, "the file is what its name says"
    made = atelier.json("generate", "a lighthouse", "--num-images", "2", "--out", str(tmp_path))
    assert [Path(image["file"]) for image in made["images"]] == [tmp_path / f"{made['id']}-{end}.png" for end in (1, 2)]


def test_without_out_the_image_is_written_here_under_its_id(
    atelier: Atelier, live: Live, ready_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = atelier.json("generate", "a lighthouse", "--lora", "outline")
    assert (tmp_path / f"{made['id']}.png").is_file()


def test_a_lora_is_tried_with_its_trigger_words(atelier: Atelier, live: Live, tmp_path: Path) -> None:
    account, key = live.member()
    mine = adapter_of(account.id, trigger_words=("ink drawing", "moon"), steps=8, guidance=1.0)
    live.run(live.resources.adapter_registry.register(mine))
    environment = {"ATELIER_BASE_URL": live.base_url, "ATELIER_KEY": key}
    tried = atelier("loras", "try", "ink", "--json", "--out", str(tmp_path / "x.png"), env=environment)
    request = live.run(generation_of(live.resources, tried.facts["id"]))
    assert request.prompt == "purple mountains under a black sky with a yellow moon, ink drawing"
    assert (request.lora_id, request.steps, request.guidance_scale) == (mine.id, 8, 1.0)
    assert (tmp_path / "x.png").is_file()


@pytest.mark.slow
def test_interface_b_with_a_given_address_and_key(atelier: Atelier, live: Live, tmp_path: Path) -> None:
    account, _ = live.member()
    _, key = live.run(live.resources.api_keys.create(account.id, interfaces=frozenset({Variant.B})))
    environment = {"ATELIER_BASE_URL": live.base_url, "ATELIER_KEY": key}
    for words in (
        ("generate", "a lighthouse", "--negative-prompt", "boats", "--width", "256", "--height", "320"),
        ("loras", "try", "outline"),
    ):
        out = tmp_path / f"{words[0]}.png"
        ended = atelier(*words, "--interface", "b", "--out", str(out), env=environment)
        assert (ended.code, out.is_file()) == (0, True), ended.err
    with Image.open(tmp_path / "generate.png") as picture:
        assert picture.size == (256, 320)
    assert atelier("upscale", str(out), env=environment).err.endswith(": --interface b uses this key\n")


def test_the_local_key_is_not_sent_to_another_address(atelier: Atelier, live: Live, ready_file: Path) -> None:
    ended = atelier("generate", "a lighthouse", "--lora", "outline", "--base-url", "http://evil.test")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "--key" in ended.err


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("generate", "x", "--lora", "nothing"), 1, "no LoRA 'nothing' for this account"),
        (("generate", "x", "--lora", PRIVATE_ADAPTER), 1, "must be a LoRA that you may use"),
        (("generate", "x", "--lora", "outline", "--steps", "151"), 1, "steps: must be between 1 and 150"),
        (("generate", "x", "--lora", "outline", "--interface", "c"), 2, "--interface"),
        (("generate", "x", "--lora", "outline", "--out", "/dev/null/x.png"), 2, "--out"),
        (("generate", "x", "--lora", "outline", "--key", "atl_wrong"), 1, "401"),
        (("generate", "x", "--lora", "outline=2.5"), 1, "loras[0].weight: "),
        (("generate", "x", "--image", "nothing.png"), 1, "nothing.png: no such file"),
        (("generate", "x", "--out", "x.png", "--format", "webp"), 2, "--out: x.png says png, and the images are webp"),
        (("generate", "x", "--out", "x.gif"), 2, "--out: x.gif says gif, and the images are png, jpeg or webp"),
        (("generate", "x", "--neg", "boats"), 2, "unrecognized arguments: --neg"),
        (("generate", "x", "--url", "nowhere", "--key", "x"), 2, "--url: must be an http"),
        (("generate", "x", "--url", "http://127.0.0.1:port", "--key", "x"), 2, "--url: Invalid port: 'port'"),
        (("generate",), 2, "prompt"),
        (("upscale", "img_" + "a" * 26), 1, "404"),
        (("upscale", "data:image/png;base64,abc"), 1, "the picture's data address is not base64"),
    ],
)
def test_an_error_is_one_line_on_stderr(
    atelier: Atelier, live: Live, ready_file: Path, words: tuple[str, ...], code: int, error: str
) -> None:
    ended = atelier(*words)
    assert (ended.code, ended.out) == (code, "")
    assert error in ended.err
    assert ended.err.count("\n") == 1


def test_a_failed_or_slow_run_ends_with_its_reason(atelier: Atelier, live: Live, ready_file: Path) -> None:
    live.outcome = "fail"
    ended = atelier("generate", "a lighthouse", "--lora", "outline")
    assert ended.code == 1
    assert "the brush broke" in ended.err
    live.outcome = "leave"
    ended = atelier("generate", "a lighthouse", "--timeout", "0.1")
    assert re.search(rf"after 0.1 s: `atelier jobs cancel job_\w+ --url {live.base_url}` stops it$", ended.err)


@pytest.mark.slow
def test_a_service_that_is_down_is_reported_soon(atelier: Atelier) -> None:
    place = {"base_url": "http://127.0.0.1:9", "console_url": "", "account": "x", "keys": {"both": "atl_x"}}
    atelier.settings.data_dir.mkdir(parents=True)
    (atelier.settings.data_dir / "local.json").write_text(json.dumps(place))
    ended = atelier("generate", "a lighthouse", "--lora", "outline")
    assert ended.code == 1
    assert "127.0.0.1" in ended.err
