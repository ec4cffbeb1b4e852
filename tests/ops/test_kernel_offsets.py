"""No Triton kernel multiplies a 32-bit index by a size on the way to an address: past 2^31 elements it would wrap."""

import ast
import itertools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "grpo_moe"
BLOCKS = ("BLOCK", "ROWS", "PAIRS", "TILES", "PART", "AHEAD")
"""Beginnings of the names of block sizes: an index times one of them counts elements along one dimension."""
ACCESSES = ("load", "store", "atomic_add", "atomic_max")


class Function:
    """A kernel or a device function: what its names are assigned, and which of its parameters are indices."""

    def __init__(self, node):
        self.node, self.name = node, node.name
        self.parameters = [argument.arg for argument in node.args.args]
        self.assigned: dict[str, list[ast.expr]] = {}
        self.indices: set[str] = set()
        self.wide_functions: set[str] = set()
        self.returned = [x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value is not None]
        for statement in ast.walk(node):
            if isinstance(statement, ast.For):
                if not name_of(statement.iter).endswith("static_range"):
                    self.indices |= names_in(statement.target)
            elif isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
                self._assign(statement)

    def _assign(self, statement):
        for target in getattr(statement, "targets", None) or [statement.target]:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            whole = isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(targets)
            values = statement.value.elts if whole else [statement.value] * len(targets)
            for one, value in zip(targets, values, strict=True):
                if isinstance(one, ast.Name):
                    self.assigned.setdefault(one.id, []).append(value)

    def calls(self, names):
        return [c for c in ast.walk(self.node) if isinstance(c, ast.Call) and name_of(c).split(".")[-1] in names]

    def is_wide(self, node) -> bool:
        """Whether an expression is int64 in every case."""
        if isinstance(node, ast.Name):
            own = self.assigned.get(node.id)
            return bool(own) and all(self.is_wide(x) for x in own if node.id not in names_in(x))
        if isinstance(node, ast.BinOp):
            return self.is_wide(node.left) or self.is_wide(node.right)
        if isinstance(node, ast.Subscript):
            return self.is_wide(node.value)
        if isinstance(node, ast.Call):
            if name_of(node).split(".")[-1] == "to":
                return any(name_of(x) == "tl.int64" for x in node.args)
            if name_of(node) in self.wide_functions:
                return True
            return name_of(node) in ("tl.where", "tl.minimum", "tl.maximum") and any(map(self.is_wide, node.args))
        return False

    def is_index(self, node, seen=frozenset()) -> bool:
        """Whether a number grows with the data: by the program, by what a load found, or by a loop."""
        if isinstance(node, ast.Name):
            if node.id in self.indices:
                return True
            return any(
                self.is_index(x, seen | {node.id}) for x in self.assigned.get(node.id, ()) if node.id not in seen
            )
        if isinstance(node, ast.Call) and name_of(node) in ("tl.program_id", "tl.load"):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
            return self.is_index(node.left, seen)
        return any(self.is_index(x, seen) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr))

    def offsets(self, addressing):
        """Every expression on the way to an address: of accesses, and of the arguments that functions address by."""
        waiting = [call.args[0] for call in self.calls(ACCESSES) if name_of(call).startswith("tl.")]
        for call in self.calls(addressing):
            for name, value in bound(call, addressing[name_of(call)][0]):
                if name in addressing[name_of(call)][1]:
                    waiting.append(value)
        seen = set()
        while waiting:
            expression = waiting.pop()
            yield expression
            for name in names_in(expression, outside_of_loads=True) - seen:
                seen.add(name)
                waiting += self.assigned.get(name, [])

    def faults(self, addressing):
        for expression in self.offsets(addressing):
            for node in walk_outside_of_loads(expression):
                if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                    continue
                sides = (node.left, node.right)
                if any(map(self.is_wide, sides)) or not any(map(self.is_index, sides)):
                    continue
                if not any(isinstance(x, ast.Constant) or name_of(x).startswith(BLOCKS) for x in sides):
                    yield f"{self.name}, line {node.lineno}: {ast.unparse(node)}"


def name_of(node) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def bound(call, parameters):
    return [*zip(parameters, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]


def is_apart(node) -> bool:
    """What a load found is checked where it is loaded, and a comparison is no number."""
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and name_of(node) == "tl.load")


def walk_outside_of_loads(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_apart(child):
            yield from walk_outside_of_loads(child)


def names_in(node, *, outside_of_loads=False) -> set[str]:
    if outside_of_loads and is_apart(node):
        return set()
    walk = walk_outside_of_loads if outside_of_loads else ast.walk
    return {x.id for x in walk(node) if isinstance(x, ast.Name)}


def functions_of(*sources):
    nodes = itertools.chain.from_iterable(ast.walk(ast.parse(source)) for source in sources)
    return [
        Function(node)
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]


def faults_of(functions):
    wide = {f.name for f in functions if f.returned and all(map(f.is_wide, f.returned))}
    for f in functions:
        f.wide_functions = wide
    addressing = {f.name: (f.parameters, set()) for f in functions}
    changed = True
    while changed:  # a parameter is an index, or part of an address, if it is one at any call
        changed = False
        for f in functions:
            reached = {n for x in f.offsets(addressing) for n in names_in(x, outside_of_loads=True)}
            found = reached & set(f.parameters)
            changed |= not found <= addressing[f.name][1]
            addressing[f.name][1].update(found)
            for call in f.calls(addressing):
                callee = next(g for g in functions if g.name == name_of(call))
                for name, value in bound(call, callee.parameters):
                    if name not in callee.indices and f.is_index(value) and not f.is_wide(value):
                        callee.indices.add(name)
                        changed = True
    return [fault for f in functions for fault in f.faults(addressing)]


def test_every_index_that_multiplies_a_size_is_64_bits_wide():
    functions = functions_of(*(path.read_text() for path in PACKAGE.rglob("*.py") if "triton.jit" in path.read_text()))
    assert len(functions) > 25 and {"_route_kernel", "_decode_kernel", "_exp_logits_kernel"} <= {
        f.name for f in functions
    }
    assert faults_of(functions) == []


BAD = {
    "program": "row = tl.program_id(0)\n    tl.load(x_ptr + row * stride)",
    "constexpr size": "row = tl.program_id(0)\n    tl.store(x_ptr + row * V + tl.arange(0, V), 0)",
    "loaded": "expert = tl.load(index_ptr + tl.program_id(0))\n    tl.load(x_ptr + (expert * stride)[:, None])",
    "rows": "row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.load(x_ptr + row[:, None] * stride)",
    "cast too late": "row = tl.program_id(0)\n    tl.load(x_ptr + (row * stride).to(tl.int64))",
    "pointer moved": "x_ptr += tl.program_id(0) // 2 * stride\n    tl.load(x_ptr)",
    "loop": "for k in range(0, stride, BLOCK):\n        tl.load(x_ptr + (k + tl.arange(0, BLOCK)) * stride)",
    "in a function": "helper(x_ptr, tl.program_id(0), stride)",
}
HELPER = "@triton.jit\ndef helper(a_ptr, row, size):\n    return tl.load(a_ptr + row * size)\n"
KERNEL = "@triton.jit\ndef kernel(x_ptr, index_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr):\n    "


@pytest.mark.parametrize("body", BAD.values(), ids=list(BAD))
def test_a_32_bit_product_is_found(body):
    assert len(faults_of(functions_of(KERNEL + body, HELPER))) == 1


@pytest.mark.parametrize("body", [
    "row = tl.program_id(0).to(tl.int64)\n    tl.load(x_ptr + row * stride)",
    "row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.load(x_ptr + row)",
    "row = tl.load(index_ptr + tl.program_id(0)).to(tl.int64)\n    tl.load(x_ptr + row[:, None] * stride + 2)",
    "helper(x_ptr, tl.program_id(0).to(tl.int64), stride)",
    "tl.load(x_ptr + tl.arange(0, BLOCK) * stride)",
])  # fmt: skip
def test_a_64_bit_product_is_none(body):
    assert faults_of(functions_of(KERNEL + body, HELPER)) == []
