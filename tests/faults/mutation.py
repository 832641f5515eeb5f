"""Makes small defects by meaning: a comparison turned, a constant moved, a statement left out, a condition negated.

Nothing here quotes the code, so that a rename breaks no test. `mutation_run` plants them for the tests to find.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
"""Not from `tests.support`, which imports modules that are to be imported with a defect."""

LUA_TURNED: Mapping[str, str] = {
    "==": "~=", "~=": "==", "<=": "<", ">=": ">", "<": "<=", ">": ">=",
    "and": "or", "or": "and", "true": "false", "false": "true",
}  # fmt: skip
_LUA_SKIPPED = r"--[^\n]*|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
_LUA_TOKEN = re.compile(
    rf"(?P<skipped>{_LUA_SKIPPED})|(?P<turned>[=~<>]=|[<>]|\b(?:and|or|true|false)\b)|(?P<number>\b\d+(?:\.\d+)?\b)"
    r"|\b(?:if|elseif)\b(?P<condition>(?:[^\n'\"]|'[^'\n]*')+?)\bthen\b"
)
_LUA_STATEMENT = re.compile(r"^ *(?:redis\.p?call|[a-z_]+)\([^\n]*\)$", re.MULTILINE)
PYTHON_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LuaMutant:
    """Replaces the characters from `start` to `end` of the script file `name` by `new`."""

    name: str
    text: str
    start: int
    end: int
    new: str

    def rewrite(self, _script: str, whole: str) -> str:
        """Plant the defect in a script that is this file or includes it."""
        return whole.replace(self.text, self.text[: self.start] + self.new + self.text[self.end :])

    def __str__(self) -> str:
        line = self.text.count("\n", 0, self.start) + 1
        return f"{self.name}.lua:{line}: `{self.text[self.start : self.end].strip()}` becomes `{self.new}`"


def lua_mutants(name: str, text: str) -> Iterator[LuaMutant]:
    """Return every defect that can be planted in the script file."""
    at = 0
    while found := _LUA_TOKEN.search(text, at):
        at = found.end()
        if turned := found["turned"]:
            yield LuaMutant(name, text, *found.span("turned"), LUA_TURNED[turned])
        elif number := found["number"]:
            yield LuaMutant(name, text, *found.span("number"), number + "1" if "." in number else str(int(number) + 1))
        elif condition := found["condition"]:
            yield LuaMutant(name, text, *found.span("condition"), f" not ({condition.strip()}) ")
            at = found.start("condition")  # what it compares is mutated, too
    for found in _LUA_STATEMENT.finditer(text):
        if found[0].count("(") == found[0].count(")"):
            yield LuaMutant(name, text, *found.span(), "")


@dataclass(frozen=True, slots=True)
class PythonMutant:
    """The defect at one place of a module, counted in the order in which `_Planter` visits them."""

    module: str
    place: int
    line: int
    described: str

    def code(self) -> CodeType:
        """Compile the module with the defect."""
        path = source_of(self.module)
        planter = _Planter(self.place)
        tree = ast.fix_missing_locations(planter.visit(ast.parse(path.read_text())))
        return compile(tree, str(path), "exec")

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.described}"


def python_mutants(module: str) -> list[PythonMutant]:
    """Return every defect that can be planted in the module."""
    planter = _Planter(None)
    planter.visit(ast.parse(source_of(module).read_text()))
    return [PythonMutant(module, place, *found) for place, found in enumerate(planter.places)]


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


class _Planter(ast.NodeTransformer):
    """Lists the places of a module, and plants a defect at the `wanted` one."""

    def __init__(self, wanted: int | None) -> None:
        self.places: list[tuple[int, str]] = []
        self._wanted = wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            if self._is_here(node, f"`{ast.unparse(node)}` is turned"):
                node.ops[index] = PYTHON_TURNED[type(operator)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_here(node, f"`{ast.unparse(node)}`: and, or exchanged"):
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self._is_here(node, f"{node.value} is negated") else node
        if isinstance(node.value, (int, float)):
            return ast.Constant(node.value + 1) if self._is_here(node, f"{node.value} is one more") else node
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_here(node, f"`if {ast.unparse(node.test)}` is negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, (ast.Call, ast.Await)):
            return node  # a docstring
        return ast.Pass() if self._is_here(node, f"`{ast.unparse(node)}` is left out") else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.Pass() if self._is_here(node, f"`{ast.unparse(node)}` is left out") else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)  # an annotation is no behavior
        return node

    def _is_here(self, node: ast.expr | ast.stmt, described: str) -> bool:
        self.places.append((node.lineno, described[:120]))
        return len(self.places) - 1 == self._wanted
