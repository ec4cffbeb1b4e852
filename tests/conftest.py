import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined


# the tensors of the tests are too small to share among threads; processes they start inherit it
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever a library did to it in a test before: sums of several threads round otherwise."""
    torch.set_num_threads(1)
