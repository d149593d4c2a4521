"""pytest-randomly, which seeds before every test, reaches torch through torchrepro."""

from importlib.util import find_spec

import pytest

TESTS = """
import torch

def test_one():
    print("drawn", torch.rand(()).item())

def test_two():
    print("drawn", torch.rand(()).item())
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pytest_randomly") is None, reason="pytest-randomly is missing")
def test_pytest_randomly_seeds_torch_before_every_test(run_python, write):
    """Under pytest-randomly a test draws the same from torch for one seed, in any order."""
    write({"test_drawing.py": TESTS, "pytest.ini": "[pytest]\n"})
    words = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider")

    one, two, other = (run_python(*words, f"--randomly-seed={number}") for number in (1, 1, 2))

    def drawn(done):
        assert done.returncode == 0, done.stdout
        return {word for word in done.stdout.split() if word.startswith("0.") and len(word) > 6}

    assert len(drawn(one)) == 2
    assert drawn(one) == drawn(two)
    assert not drawn(one) & drawn(other)
