"""Makes small defects by meaning: a comparison turned, a constant moved, a statement left out, a condition negated.

Nothing here quotes the code, so that a rename breaks no test. `mutation_run` plants them for the tests to find.
"""

import ast
import gc
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).parents[2]
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
        column = self.start - self.text.rfind("\n", 0, self.start)
        return f"{self.name}.lua:{line}:{column}: `{self.text[self.start : self.end].strip()}` becomes `{self.new}`"


def lua_mutants(name: str, text: str) -> Iterator[LuaMutant]:
    """Return every defect that can be planted in a script file of this text."""
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
    """The defect at one place of a module's functions, counted in the order in which `_Planter` visits them."""

    module: str
    place: int
    line: int
    function: int
    """The first line of the outermost function that has the place."""
    described: str

    def code(self) -> CodeType:
        """Compile the function with the defect."""
        path = source_of(self.module)
        planter = _Planter(self.place)
        tree = ast.fix_missing_locations(planter.visit(ast.parse(path.read_text())))
        (code,) = _functions_at(self.function, compile(tree, str(path), "exec"))
        return code

    def plant(self) -> None:
        """Put the defect into the function of this process. Raises `LookupError` when there is none."""
        code = self.code()
        gc.unfreeze()  # `tests/conftest.py` hides what was imported from the collector
        functions = [
            found
            for found in gc.get_objects()
            if type(found) is FunctionType
            and found.__code__.co_firstlineno == self.function
            and found.__code__.co_filename == code.co_filename
        ]
        if not functions:
            raise LookupError(str(self))
        for function in functions:
            function.__code__ = code

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.described}"


def _functions_at(line: int, code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_flags & inspect.CO_OPTIMIZED:
            if inner.co_firstlineno == line:
                yield inner
        elif isinstance(inner, CodeType):
            yield from _functions_at(line, inner)  # a class


def python_mutants(module: str) -> list[PythonMutant]:
    """Return every defect that can be planted in the module's functions."""
    planter = _Planter(None)
    planter.visit(ast.parse(source_of(module).read_text()))
    return [PythonMutant(module, place, *found) for place, found in enumerate(planter.places)]


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


class _Planter(ast.NodeTransformer):
    """Lists the places of a module's functions, and plants a defect at the `wanted` one."""

    def __init__(self, wanted: int | None) -> None:
        self.places: list[tuple[int, int, str]] = []
        self._wanted = wanted
        self._function: int | None = None

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if self._function is not None:
            return self.generic_visit(node)
        self._function = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        node.body = [self.visit(statement) for statement in node.body]  # the defaults belong to the module
        self._function = None
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            if self._is_here(node, f"`{ast.unparse(node)}` is turned"):
                node.ops[index] = PYTHON_TURNED[type(operator)]()
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)  # as an assertion: `zip` of equal lengths

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

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node  # a check that never fails is not missed

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.Pass() if self._is_here(node, f"`{ast.unparse(node)}` is left out") else self.generic_visit(node)

    def _is_here(self, node: ast.expr | ast.stmt, described: str) -> bool:
        if self._function is None:
            return False
        self.places.append((node.lineno, self._function, described[:120]))
        return len(self.places) - 1 == self._wanted
