"""Scripts with a part replaced: a planted defect, or another version of the code."""

from datetime import timedelta

from serve_app.domain.durations import milliseconds
from serve_app.store.script import Rewrite, load_script


def later(by: timedelta) -> Rewrite:
    """Let scripts read a clock that is ahead."""
    return lambda _, text: text.replace("local function K(", f"now = now + {milliseconds(by)}\nlocal function K(", 1)


def replacing(script: str, old: str, new: str) -> Rewrite:
    """Replace `old`, which must occur once, in the script `concern/name`; the others stay as they are.

    Raises `FileNotFoundError` for a script that there is not.
    """
    load_script(script)

    def rewrite(name: str, text: str) -> str:
        if name != script:
            return text
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {script}.lua"
        return text.replace(old, new)

    return rewrite
