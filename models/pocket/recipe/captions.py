"""Writes varied captions of a scene.

A part that a caption leaves out may have any value in the picture.
"""

import random

from .scenes import Scene, Thing

SIZE_WORDS = {
    "small": ("small", "small", "little", "tiny"),
    "large": ("large", "large", "big", "huge"),
    "medium": ("",),
}
SHAPE_WORDS = {
    "circle": ("circle", "circle", "circle", "disc", "ball"),
    "square": ("square", "square", "square", "box"),
    "moon": ("moon", "moon", "crescent moon", "crescent"),
    "cross": ("cross", "cross", "plus sign"),
    "ring": ("ring", "ring", "ring", "hoop"),
}
POSITION_WORDS = {
    "left": ("on the left", "on the left", "at the left", "on the left side"),
    "right": ("on the right", "on the right", "at the right", "on the right side"),
    "top": ("at the top", "at the top", "in the upper part", "near the top"),
    "bottom": ("at the bottom", "at the bottom", "in the lower part", "near the bottom"),
    "center": ("in the center", "in the center", "in the middle"),
}
RELATION_WORDS = {
    "left of": ("on the left of", "to the left of", "left of"),
    "right of": ("on the right of", "to the right of", "right of"),
    "above": ("above", "above", "over"),
    "below": ("below", "below", "under"),
    "and": ("and", "and", "beside", "next to"),
}
OPENINGS = ("", "", "", "", "", "", "a picture of ", "a drawing of ", "an image of ", "an illustration of ")
LANDSCAPE_WORDS: dict[str, tuple[str, ...]] = {
    "hills": (
        "a {0} sun over {1} hills under a {sky} sky",
        "a {sky} sky with a {0} sun above {1} hills",
        "{1} hills, a {0} sun and a {sky} sky",
    ),
    "house": (
        "a {0} house with a {1} roof on a {2} field under a {sky} sky",
        "a {0} house, {1} roof, {2} field, {sky} sky",
        "a house with {0} walls and a {1} roof on {2} ground and a {sky} sky",
    ),
    "boat": (
        "a {0} boat with a {1} sail on {2} water under a {sky} sky",
        "a {0} boat with {1} sails on the {2} sea and a {sky} sky",
        "a sailing boat, {0} hull, {1} sail, {2} water, {sky} sky",
    ),
    "tree": (
        "a tree with {0} leaves on a {1} hill under a {sky} sky",
        "a {0} tree on a {1} hill and a {sky} sky",
        "{sky} sky, a {0} tree on {1} ground",
    ),
    "mountains": (
        "{1} mountains under a {sky} sky with a {0} moon",
        "a {0} full moon over {1} mountains and a {sky} sky",
        "{sky} sky, {0} full moon, {1} mountains",
    ),
    "flower": (
        "a {0} flower with a {1} middle on a {sky} background",
        "a flower with {0} petals and a {1} middle on {sky}",
        "{sky} background, a {0} flower with a {1} center",
    ),
}


def caption(scene: Scene, rng: random.Random) -> str:
    """Write a caption: mostly a full description, one time in eight only a part of it.

    Such a part, as a color alone, stands for short and negative prompts.
    """
    if rng.random() < 0.125:
        return _partial(scene, rng)
    return full_caption(scene, rng)


def full_caption(scene: Scene, rng: random.Random) -> str:
    if scene.landscape:
        words = rng.choice(LANDSCAPE_WORDS[scene.landscape])
        return rng.choice(OPENINGS) + _tidy(words.format(*scene.parts, sky=scene.background))
    return _with_background(_objects(scene, rng), scene.background, rng)


def plain_caption(scene: Scene) -> str:
    """Return the first wording, for reports: the same for the same scene."""
    if scene.landscape:
        return _tidy(LANDSCAPE_WORDS[scene.landscape][0].format(*scene.parts, sky=scene.background))
    objects = [_tidy(f"a {'' if t.size == 'medium' else t.size} {t.color} {t.shape}") for t in scene.things]
    if scene.relation:
        middle = RELATION_WORDS[scene.relation][0]
        return f"{objects[0]} {middle} {objects[1]} on a {scene.background} background"
    place = POSITION_WORDS[scene.things[0].position][0] if scene.things[0].position else ""
    return _tidy(f"{objects[0]} {place} on a {scene.background} background")


def _partial(scene: Scene, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(sorted(scene.colors))
    if kind < 0.55:
        return rng.choice((f"{scene.background} background", f"a {scene.background} background"))
    if scene.landscape:
        return rng.choice((f"a {scene.landscape}", scene.landscape, f"{scene.parts[0]} {scene.landscape}"))
    if kind < 0.8:
        return _objects(scene, rng)
    thing = rng.choice(scene.things)
    return rng.choice((thing.shape, f"a {thing.shape}", f"{thing.color} {thing.shape}"))


def _objects(scene: Scene, rng: random.Random) -> str:
    named = [_named(thing, rng) for thing in scene.things]
    if scene.relation:
        return f"{named[0]} {rng.choice(RELATION_WORDS[scene.relation])} {named[1]}"
    position = scene.things[0].position
    return _tidy(f"{named[0]} {rng.choice(POSITION_WORDS[position])}") if position else named[0]


def _named(thing: Thing, rng: random.Random) -> str:
    size = rng.choice(SIZE_WORDS[thing.size])
    return _tidy(f"a {size} {thing.color} {rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))}")


def _with_background(objects: str, background: str, rng: random.Random) -> str:
    form = rng.random()
    if form < 0.6:
        return f"{rng.choice(OPENINGS)}{objects} on a {background} background"
    if form < 0.75:
        return f"{rng.choice(OPENINGS)}{objects} on {background}"
    if form < 0.9:
        return f"{objects}, {background} background"
    return f"{background} background with {objects}"


def _tidy(text: str) -> str:
    words = " ".join(text.split())
    return f" {words}".replace(" a orange", " an orange").strip()
