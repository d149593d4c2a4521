"""The example that times cuDNN's benchmark prints its table, and says so where there is no GPU."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "cudnn_benchmark.py"
BRIEFLY = (str(EXAMPLE), "--passes", "1", "--size", "32")
PARAMETERS = 25_557_032  # of the network as published, with 1000 classes
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def printed(fork_python):
    """Run Python with these words, which ends well; returns the lines that it prints."""

    def printed(*words, **variables):
        done = fork_python(*words, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return printed


def _check_table(lines, knob):
    heading, *rows = lines

    assert heading.split()[0] == knob
    assert [row.split()[0] for row in rows] == ["off", "on"]
    assert all(re.fullmatch(r"o\w+ +\d+\.\d\d s +\d+\.\d\d s", row) for row in rows)


@pytest.mark.slow
def test_without_a_gpu_the_example_says_so_and_times_the_cpu(printed):
    """Where no CUDA device is seen a line says it, and the table is of oneDNN."""
    first, said, where, how_long, *lines = printed(*BRIEFLY, CUDA_VISIBLE_DEVICES="")

    assert "to say how long" in first
    assert "No CUDA device" in said
    assert re.search(r"1 in each of 4 cells: about \d+ s", how_long)
    assert f"torch {torch.__version__}, CPU" in where
    _check_table(lines, "backends.cpu.mkldnn_enabled")


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_a_gpu_the_example_times_cudnn(printed):
    """Where there is a CUDA device the table is of cuDNN on that device."""
    _, where, _, *lines = printed(*BRIEFLY)

    assert torch.cuda.get_device_name() in where
    _check_table(lines, "backends.cudnn.benchmark")


def test_passes_fit_into_the_time_there_is():
    """However slow a machine is, no more passes are made than fit, and one at least."""
    fits = runpy.run_path(str(EXAMPLE))["passes_within"]

    assert [fits(60, each) for each in (0.001, 1.2, 7.0, 60.0, 100.0)] == [50, 50, 8, 1, 1]
    assert fits(-3, 63.0) == 1


def test_the_network_of_the_example_is_a_resnet_50():
    """It has as many parameters as the published network, and takes images of any shape."""
    model = runpy.run_path(str(EXAMPLE))["resnet50"]().eval()

    assert sum(each.numel() for each in model.parameters()) == PARAMETERS
    assert model(torch.rand(2, 3, 40, 33)).shape == (2, 1000)
