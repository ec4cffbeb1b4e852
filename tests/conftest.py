import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
