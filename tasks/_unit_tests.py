"""Analyses the programs that test an answer, without running them. Standard library only."""

import ast
import builtins
import sys
from typing import NamedTuple


class Programs(NamedTuple):
    """Test programs and the number of their results: one per program, or one per assertion of a single program.

    `repeated` holds the numbers of assertions that may run more than once, so that their result is known at the end.
    """

    trees: list[ast.Module]
    count: int
    repeated: frozenset[int] = frozenset()


class _Asserts(ast.NodeTransformer):
    """Numbers the assertions of a test program and makes it continue after a failed one. `assert True` is no test.

    A function runs once if the tester calls it and the program itself never names it.
    """

    def __init__(self, named: set[str]) -> None:
        self.named = named
        self.count = 0
        self.repeated: set[int] = set()
        self._depth = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):  # a false one marks a place that must not be reached
            return ast.copy_location(ast.Pass(), node) if node.test.value else node
        judged = ast.parse(f"__judge__({self.count}, lambda: 0)", mode="exec").body[0]
        assert isinstance(judged, ast.Expr) and isinstance(judged.value, ast.Call)
        lazy = judged.value.args[1]
        assert isinstance(lazy, ast.Lambda)
        lazy.body = node.test
        if self._depth:
            self.repeated.add(self.count)
        self.count += 1
        return ast.fix_missing_locations(ast.copy_location(judged, node))

    def _visit_repeated(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_For = visit_AsyncFor = visit_While = visit_AsyncFunctionDef = visit_ClassDef = _visit_repeated

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        once = (node.name == "check" or node.name.startswith("test")) and node.name not in self.named
        return self.generic_visit(node) if once else self._visit_repeated(node)


def parse_tests(tests: str | list[str]) -> Programs:
    if not isinstance(tests, str):
        return Programs([ast.parse(test) for test in tests], len(tests))
    tree = ast.parse(tests)
    asserts = _Asserts({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    return Programs([asserts.visit(tree)], max(asserts.count, 1), frozenset(asserts.repeated))


def names_needed(trees: list[ast.Module], setup: str) -> list[str]:
    """The names that the tests use, but that neither the tests nor `setup` nor Python define."""
    nodes = [node for tree in [*trees, ast.parse(setup)] for node in ast.walk(tree)]
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    defined |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return sorted(used - defined - set(dir(builtins)) - {"__judge__"})


def name_of_pythons(tests: str | list[str], reference: str) -> str | None:
    """A function that the reference defines and the tests call under a builtin's name, such as MBPP's `sum(a, b)`."""
    try:
        theirs = {node.name for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef)}
        nodes = [node for tree in parse_tests(tests).trees for node in ast.walk(tree)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # whoever runs them says so
    theirs &= {*dir(builtins), *sys.stdlib_module_names}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return min(theirs & called, default=None)
