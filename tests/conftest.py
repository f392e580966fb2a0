"""Settings shared by all tests: one Hypothesis profile, one thread, one seed."""

import os
import signal

import pytest
import torch
from hypothesis import settings

# No deadlines anywhere: the machines are noisy. In CI the examples are the same in every run.
settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

torch.set_num_threads(1)  # the tensors of a test are too small to share
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
