"""Without a CUDA device everything here is skipped; with one, float32 products are exact."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def _no_compiled_code_is_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
