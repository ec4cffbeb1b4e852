"""Imports go one way: rl -> {rollout, data} -> {models, adapters, planning} -> {ops, rewards, types}."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = {
    "ops": 0, "rewards": 0, "types": 0, "arguments": 0, "text": -1, "checks": -1,
    "models": 1, "adapters": 1, "planning": 1,
    "rollout": 2, "data": 2,
    "rl": 3, "cli": 4,
}  # fmt: skip


def imported_modules(path: Path):
    """Absolute names of what a file imports, relative imports resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = f"{base}.{node.module or ''}".strip(".") if base else node.module
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # the name may be a module itself


def package_files():
    return sorted((ROOT / "grpo_moe").rglob("*.py"))


def part_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "grpo_moe" and len(parts) > 1 else None


def test_imports_go_down_the_layers():
    wrong = []
    for path in package_files():
        own = path.relative_to(ROOT / "grpo_moe").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imported_modules(path):
            other = part_of(module)
            if other not in LAYERS or other == own:
                continue
            if LAYERS[other] >= LAYERS[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, wrong


def test_every_part_of_the_package_has_a_layer():
    parts = {path.relative_to(ROOT / "grpo_moe").parts[0].removesuffix(".py") for path in package_files()}
    assert parts - {"__init__"} <= set(LAYERS)


def test_ops_know_no_framework_above_torch():
    forbidden = ("transformers", "accelerate", "datasets", "torch.distributed")
    for path in package_files():
        if "ops" in path.parts:
            assert not [m for m in imported_modules(path) if m.startswith(forbidden)], path


def test_only_rl_knows_processes():
    for path in package_files():
        if "rl" not in path.parts:
            assert not [m for m in imported_modules(path) if m.startswith(("accelerate", "torch.distributed"))], path
