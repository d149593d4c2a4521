"""`digest` identifies a checkpoint by its content, in every format, and runs none of its code."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchrepro.checkpoint_digest import differences, digest_checkpoint
from torchrepro.ground.errors import ProfileError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)
EXAMPLES = settings(max_examples=15)
NAMES = st.text("abc._0", min_size=1, max_size=6)
GIGABYTES = 2_000_000_000
ROOM = 400_000_000
"""The most bytes that reading may take, beside Python and torch."""


def tensor_of(data, dtype, shape):
    """Return a tensor of any bits that its dtype can have."""
    length = torch.empty(shape).numel() * dtype.itemsize
    content = data.draw(st.binary(min_size=length, max_size=length))
    content = bytes(byte & 1 for byte in content) if dtype is torch.bool else content
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if length else torch.empty(0)
    return flat.to(dtype).reshape(shape)


@st.composite
def flat_states(draw, least=0):
    """Return a mapping of names to tensors, which every format can store."""
    data = draw(st.data())
    shapes = st.lists(st.integers(0 if not least else 1, 3), max_size=3)
    names = draw(st.lists(NAMES, min_size=least, max_size=4, unique=True))
    return {name: tensor_of(data, draw(st.sampled_from(DTYPES)), draw(shapes)) for name in names}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)
)
STATES = st.recursive(
    st.one_of(VALUES, st.just(torch.arange(3)), st.just(torch.eye(2).t())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, st.integers()), inner)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for the files of all examples."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(autouse=True)
def _quiet_torch(caplog):
    """Omit the debug log of torch's checkpoints from the report of a failure."""
    caplog.set_level("ERROR")


def digest(path):
    """Return the digest of a checkpoint."""
    return digest_checkpoint(str(path)).digest


def changes(first, second):
    """Return the differences of two checkpoints by name."""
    made = [digest_checkpoint(str(path)) for path in (first, second)]
    return {difference.name: difference for difference in differences(*made)}


def zipped_again(source, target, method):
    """Copy a zip file, and compress its entries by another method."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def write_all(state, folder):
    """Save a state in each format; return the paths."""
    paths = [folder / name for name in ("new.pt", "old.pt", "state.safetensors", "sharded")]
    torch.save(state, paths[0])
    torch.save(state, paths[1], _use_new_zipfile_serialization=False)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, paths[2])
    dcp.save(state, checkpoint_id=paths[3])
    return paths


class Code:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@EXAMPLES
@given(state=STATES)
def test_a_state_that_is_saved_twice_has_one_digest(folder, state):
    """Neither the name in the archive nor the compression matters, and neither does the format."""
    paths = [folder / f"{number}.pt" for number in range(5)]
    torch.save(state, paths[0])
    torch.save(state, paths[1])
    torch.save(state, paths[2], _use_new_zipfile_serialization=False)
    zipped_again(paths[0], paths[3], zipfile.ZIP_DEFLATED)
    zipped_again(paths[0], paths[4], zipfile.ZIP_STORED)

    assert len(set(map(digest, paths))) == 1
    assert not any(changes(paths[0], path) for path in paths[1:])


@EXAMPLES
@given(state=flat_states())
def test_every_format_gives_a_state_one_digest(tmp_path_factory, state):
    """A file of torch.save, old or new, a safetensors file and a sharded folder are the same."""
    paths = write_all(state, tmp_path_factory.mktemp("formats"))

    assert len(set(map(digest, paths))) == 1


def test_every_version_of_torch_gives_a_state_one_digest(tmp_path):
    """The digest of a fixed state is a constant, which each tested version of torch has to give."""
    state = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3).t(), "bias": torch.tensor([0.5, -0.0])},
        "half": torch.tensor([1.0, 2.0]).bfloat16(),
        "optimizer": [{"lr": 0.1, "betas": (0.9, 0.999), "steps": 3, "name": "a", "none": None}],
    }
    torch.save(state, tmp_path / "state.pt")
    dcp.save(state, checkpoint_id=tmp_path / "sharded")

    assert digest(tmp_path / "state.pt") == GOLDEN
    assert digest(tmp_path / "sharded") == GOLDEN


GOLDEN = "f884db2c644e3c1321628536914847fc2593028b42c43a5edc8595f76bfa4285"


def test_order_strides_and_other_attributes_do_not_matter(tmp_path):
    """Equal elements under equal names are one state, as a program would load it."""
    weight = torch.randn(3, 4)
    torch.save({"a": weight, "b": torch.ones(2)}, tmp_path / "a.pt")
    other = {"b": torch.nn.Parameter(torch.ones(2)), "a": weight.t().contiguous().t()}
    torch.save(other, tmp_path / "b.pt")

    assert digest(tmp_path / "a.pt") == digest(tmp_path / "b.pt")


@EXAMPLES
@given(state=flat_states(least=1), data=st.data())
def test_one_changed_bit_is_found_and_named(tmp_path_factory, state, data):
    """Each bit of each tensor counts, in each format, and no other tensor is named."""
    name = data.draw(st.sampled_from(sorted(state)))
    bits = state[name].contiguous().view(-1).view(torch.uint8).clone()
    at = data.draw(st.integers(0, len(bits) - 1))
    bits[at] ^= 1 if state[name].dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    changed = state | {name: bits.view(state[name].dtype).view(state[name].shape)}
    paths = write_all(state, tmp_path_factory.mktemp("bits"))
    changed_paths = write_all(changed, tmp_path_factory.mktemp("bits"))

    for path, changed_path in zip(paths, changed_paths, strict=True):
        found = changes(path, changed_path)
        assert list(found) == [name]
        assert found[name].elements == 1
    assert len({*map(digest, paths), *map(digest, changed_paths)}) == 2


@EXAMPLES
@given(state=flat_states(least=1))
def test_a_renamed_key_is_another_state(folder, state):
    """Both names are shown, each in the checkpoint that has it."""
    name = next(iter(state))
    renamed = {f"{key}x" if key == name else key: value for key, value in state.items()}
    torch.save(state, folder / "a.pt")
    torch.save(renamed, folder / "b.pt")

    assert digest(folder / "a.pt") != digest(folder / "b.pt")
    assert set(changes(folder / "a.pt", folder / "b.pt")) == {name, f"{name}x"}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_another_dtype_of_equal_values_is_another_state(tmp_path, dtype):
    """The difference says that the values are equal."""
    torch.save({"a": torch.tensor([0.0, 1.0])}, tmp_path / "a.pt")
    torch.save({"a": torch.tensor([0, 1]).to(dtype)}, tmp_path / "b.pt")

    found = changes(tmp_path / "a.pt", tmp_path / "b.pt")["a"]

    assert found.elements == 0
    assert "equal values" in found.change
    assert str(dtype).removeprefix("torch.") in found.change


@EXAMPLES
@given(values=st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 2), min_size=1, max_size=9))
def test_the_difference_of_two_tensors_is_what_torch_computes(folder, values):
    """The number of elements and the largest difference are those of plain torch."""
    left, right = torch.tensor(values, dtype=torch.float64).unbind(1)
    torch.save({"a": left.clone()}, folder / "left.pt")
    torch.save({"a": right.clone()}, folder / "right.pt")

    found = changes(folder / "left.pt", folder / "right.pt")

    if digest(folder / "left.pt") != digest(folder / "right.pt"):
        bits = left.contiguous().view(torch.int64) != right.contiguous().view(torch.int64)
        assert found["a"].elements == bits.sum()
        assert found["a"].largest == (left - right).abs().max()
    else:
        assert not found


@pytest.mark.parametrize(
    ("first", "second"),
    [(5, 6), (1, True), (1, 1.0), ("1", 1), (0.0, -0.0), ([], {}), (None, False), (b"a", "a")],
)
def test_other_values_count_by_type_and_value(tmp_path, first, second):
    """What is no tensor makes a digest another one as well."""
    torch.save({"a": first}, tmp_path / "a.pt")
    torch.save({"a": second}, tmp_path / "b.pt")

    assert list(changes(tmp_path / "a.pt", tmp_path / "b.pt")) == ["a"]


def test_sparse_and_quantized_tensors_count(tmp_path):
    """They are not compared element by element, but each has a digest."""
    tensors = (
        *(torch.eye(2).to_sparse(), torch.eye(3).to_sparse(), torch.eye(2).to_sparse_csr()),
        *(torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.quint8) for scale in (0.1, 0.2)),
    )
    for number, tensor in enumerate(tensors):
        torch.save(tensor, tmp_path / f"{number}.pt")

    assert len({digest(tmp_path / f"{number}.pt") for number in range(len(tensors))}) == 5


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="an older torch")
def test_a_dtype_without_arithmetic_has_a_digest(tmp_path):
    """The elements of packed dtypes are not compared, but each bit counts."""
    for number in range(2):
        content = torch.tensor([number], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        torch.save({"a": content}, tmp_path / f"{number}.pt")

    assert changes(tmp_path / "0.pt", tmp_path / "1.pt")["a"].change == "other elements"


def test_two_keys_that_make_one_name_are_two_values(tmp_path):
    """Keys are joined by dots, and no value is lost if a key has dots itself."""
    torch.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "a.pt")
    torch.save({"a.b": 1, "a": {"b": 3}}, tmp_path / "b.pt")

    assert len(changes(tmp_path / "a.pt", tmp_path / "b.pt")) == 1


def zipped_metadata(folder, marker):
    """Write a sharded folder whose `.metadata` calls code when it is loaded."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Code(marker)))


def sharded_value(folder, marker):
    """Write a sharded folder in which a value calls code when it is loaded."""
    dcp.save({"a": Code(marker)}, checkpoint_id=folder)


WITH_CODE = {
    "zip": lambda path, marker: torch.save({"a": Code(marker)}, path),
    "old": lambda path, marker: torch.save(
        {"a": Code(marker)}, path, _use_new_zipfile_serialization=False
    ),
    "script": lambda path, _: torch.jit.script(torch.nn.Linear(1, 1)).save(path),
    "metadata": zipped_metadata,
    "value": sharded_value,
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("where", WITH_CODE)
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, command, monkeypatch, where):
    """The code is named, in every file that is a pickle, whatever torch's own switch says."""
    marker = tmp_path / "the code was run"
    WITH_CODE[where](tmp_path / "state", marker)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker.unlink(missing_ok=True)

    status, out, err = command("digest", tmp_path / "state")

    assert (status, out) == (2, "")
    assert "which is not run" in err
    assert not marker.exists()


@EXAMPLES
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_refused(folder, share):
    """Wherever it ends, the error names it, in each format.

    The old format may end within the name of a class, which is then refused as unknown code.
    """
    state = {"a": torch.arange(100.0)}
    for path in write_all(state, folder):
        files = [path] if path.is_file() else [path / ".metadata", *path.glob("*.distcp")]
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[: int(len(content) * share)])
            with pytest.raises(ProfileError, match=str(path)) as raised:
                digest(path)
            file.write_bytes(content)
            is_clear = "damaged, cut off" in str(raised.value)
            assert is_clear or ("which is not run" in str(raised.value) and path.name == "old.pt")


def test_a_missing_shard_is_named(tmp_path, command):
    """The error names the file that is missing."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "state")
    shard = next((tmp_path / "state").glob("*.distcp"))
    shard.unlink()

    status, _, err = command("digest", tmp_path / "state")

    assert status == 2
    assert str(shard) in err


def test_the_answers_of_the_command(tmp_path, command, answer, monkeypatch):
    """One file is listed, several are compared with the first; status 1 if any differs."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2, 3), "step": 1, "api_key": "secret"}, "a.pt")
    torch.save({"w": torch.full((2, 3), 1.5), "step": 2, "api_key": "other"}, "b.pt")

    status, out, err = command("digest", "a.pt")
    assert (status, err) == (0, "")
    assert out.startswith(f"{digest('a.pt')}  a.pt\n")
    assert "float32 [2, 3]" in out
    assert command("digest", "a.pt", "a.pt")[:2] == (0, f"{digest('a.pt')}  a.pt\n" * 2 + "same\n")

    status, out, _ = command("digest", "a.pt", "a.pt", "b.pt")
    assert status == 1
    assert "6 of 6 elements differ, by at most 0.5" in out
    assert "1 -> 2" in out
    assert "secret" not in out

    status, document = answer("digest", "a.pt", "b.pt")
    assert (status, document["same"]) == (1, False)
    assert [row["name"] for row in document["differences"]] == ["w", "step", "api_key"]
    assert document["differences"][0]["largest"] == 0.5
    assert answer("digest", "a.pt")[1]["same"] is None


def test_a_file_that_is_loaded_as_a_whole_is_named(tmp_path, command):
    """The old format and compressed archives are not read piece by piece, and a note says so."""
    torch.save({"a": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    assert "all of it was loaded into memory" in command("digest", tmp_path / "a.pt")[2]


def test_a_wrong_name_is_answered_with_a_near_one(tmp_path, command):
    """Neither a missing file nor a folder without a checkpoint ends in a traceback."""
    torch.save({"a": 1}, tmp_path / "model.pt")

    status, _, err = command("digest", tmp_path / "modle.pt")
    assert status == 2
    assert "did you mean: model.pt" in err
    status, _, err = command("digest", tmp_path)
    assert status == 2
    assert "No such file" in err
    assert "did you mean" not in err
    status, _, err = command("digest", tmp_path / "no" / "folder" / "model.pt")
    assert status == 2
    assert "No such file" in err


def test_a_missing_package_is_named(tmp_path, command, monkeypatch):
    """Without safetensors, its files are refused with the command that installs it."""
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)

    status, _, err = command("digest", tmp_path / "a.safetensors")

    assert status == 2
    assert "pip install safetensors" in err


def write_sparse_safetensors(path):
    """Write a file whose elements take no room on the disk."""
    rows = {"a": {"dtype": "F32", "shape": [GIGABYTES // 4], "data_offsets": [0, GIGABYTES]}}
    header = json.dumps(rows).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + GIGABYTES)


def write_large_zip(path):
    """Write a file of torch.save."""
    torch.save({"a": torch.zeros(GIGABYTES // 4), "b": 1}, path)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_sparse_safetensors, write_large_zip])
def test_two_gigabytes_are_read_in_bounded_memory(tmp_path, write):
    """The most memory that reading takes does not depend on the size of the tensor."""
    torch.save({"a": 1}, tmp_path / "small.pt")
    write(tmp_path / "large")

    peaks = []
    for name in ("small.pt", "large"):
        code = (
            "import resource, sys\n"
            "from torchrepro.checkpoint_digest import digest_checkpoint\n"
            "digest_checkpoint(sys.argv[1])\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        words = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)

    print(f"{peaks[0] / 1e6:.0f} MB without elements, {peaks[1] / 1e6:.0f} MB with 2 GB")
    assert peaks[1] - peaks[0] < ROOM


RANK = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2))
whole = torch.arange(35.0).reshape(5, 7)
rows = init_device_mesh("cpu", (4,))
state = {
    "grid": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
    "rows": distribute_tensor(whole, rows, [Shard(0)]),
    "step": 3,
}
dcp.save(state, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_of_several_ranks_are_one_tensor(tmp_path):
    """Shards of rows and of a grid, of unequal sizes, have the digest of the whole tensors."""
    (tmp_path / "save.py").write_text(RANK, encoding="utf-8")
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "save.py", "sharded"]
    subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    whole = torch.arange(35.0).reshape(5, 7)
    torch.save({"grid": whole, "rows": whole.clone(), "step": 3}, tmp_path / "whole.pt")

    assert digest(tmp_path / "sharded") == digest(tmp_path / "whole.pt")
