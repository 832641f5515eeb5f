"""A browser without JavaScript: it keeps cookies, follows links, fills forms and names its origin."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx
from starlette.types import ASGIApp

ORIGIN = "http://service.test"


@dataclass(slots=True)
class Form:
    """A form as the page gave it, with its address, fields and buttons."""

    action: str
    fields: dict[str, str] = field(default_factory=dict[str, str])
    buttons: list[str] = field(default_factory=list[str])
    id: str = ""


class Page(HTMLParser):
    """An answer, and what a person sees of it."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self.answer = answer
        self.status = answer.status_code
        self.forms: list[Form] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._texts: list[str] = []
        self._in_button: Form | None = None
        self.feed(answer.text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    def form(self, button: str) -> Form:
        """Return the form with this button."""
        return next(form for form in self.forms if button in form.buttons)

    def tagged(self, element_id: str) -> bool:
        return any(attributes.get("id") == element_id for _, attributes in self.tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag == "form":
            self.forms.append(Form(attributes.get("action", ""), id=attributes.get("id", "")))
        elif tag == "input" and _is_sent(attributes):
            self._form_of(attributes).fields[attributes["name"]] = attributes.get("value", "")
        elif tag == "a":
            self.links.append(attributes["href"])
        self._in_button = self._form_of(attributes) if tag == "button" else None

    def handle_data(self, data: str) -> None:
        self._texts.append(data)
        if self._in_button and data.strip():
            self._in_button.buttons.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        if tag == "button":
            self._in_button = None

    def _form_of(self, attributes: dict[str, str]) -> Form:
        """Return the form that an input or a button names or stands in; a part of a page may lack it."""
        named = [form for form in self.forms if form.id == attributes.get("form")]
        return (named or self.forms or [Form("")])[-1]


def _is_sent(input_: dict[str, str]) -> bool:
    """Return whether a form has a value of this input: scripts use those without a name."""
    is_box = input_.get("type") in ("checkbox", "radio")
    return "name" in input_ and input_.get("type") != "file" and ("checked" in input_ or not is_box)


class Browser:
    """A browser at one address."""

    def __init__(
        self, app: ASGIApp, *, address: str = "203.0.113.7", origin: str = ORIGIN, headers: dict[str, str] | None = None
    ) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 40000))
        self.http = httpx.AsyncClient(transport=transport, base_url=origin, follow_redirects=True, headers=headers)

    async def open(self, path: str) -> Page:
        return Page(await self.http.get(path))

    async def send(self, form: Form, **fields: str) -> Page:
        """Send the form as it was given, with `fields` filled in, and follow where that leads."""
        answer = await self.http.post(
            form.action, data={**form.fields, **fields}, headers={"Sec-Fetch-Site": "same-origin"}
        )
        return Page(answer)

    async def press(self, path: str, button: str, **fields: str) -> Page:
        """Open a page, and send its form with this button."""
        return await self.send((await self.open(path)).form(button), **fields)

    async def sign_in(self, name: str, password: str) -> Page:
        return await self.press("/console/sign-in", "Sign in", name=name, password=password)

    async def aclose(self) -> None:
        await self.http.aclose()
