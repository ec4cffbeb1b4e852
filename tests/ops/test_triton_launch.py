import pytest
import torch

from grpo_moe.ops import triton_launch as module
from grpo_moe.ops.triton_launch import launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Kernel:
    """What launch uses of a Triton kernel: says how often it was bound and what the compiled one was called with."""

    arg_names = ["x_ptr", "n", "BLOCK", "FLAG"]

    def __init__(self):
        self.bound, self.called = 0, []

    def __getitem__(self, grid):
        def bind(*args, **constants):
            self.bound += 1
            return {grid: lambda *given: self.called.append(given)}

        return bind


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(module, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def test_a_second_launch_calls_the_compiled_kernel_with_its_constants_in_order(compiled):
    x = torch.zeros(32)
    for n in (32, 48):  # both multiples of 16
        launch(compiled, (2, 1, 1), x, n, FLAG=True, BLOCK=16, num_warps=4)
    assert compiled.bound == 1 and compiled.called == [(x, 48, 16, True)]


def test_what_triton_specialises_for_binds_again(compiled):
    x = torch.zeros(33)
    variants = [(x, 32), (x, 33), (x, 1), (x, 2**40), (x[1:], 32), (x.half(), 32)]
    for args in variants:
        launch(compiled, (2, 1, 1), *args, FLAG=True, BLOCK=16)
    launch(compiled, (2, 1, 1), x, 32, FLAG=False, BLOCK=16)
    assert compiled.bound == len(variants) + 1 and not compiled.called


@triton.jit
def _scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("n", [1, 15, 16, 48])
def test_results_do_not_depend_on_what_was_launched_before(n, start):
    for factor in (2.0, 3.0, 2.0):
        x, out = torch.randn(64, device=DEVICE)[start:], torch.zeros(64, device=DEVICE)
        launch(_scale_kernel, (4, 1, 1), x, out, n, factor, BLOCK=16)
        assert torch.equal(out[:n], x[:n] * factor) and not out[n:].any()
