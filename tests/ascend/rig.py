"""Build a Python with the real torch_npu where there is no Ascend device: ``rig.py FOLDER``.

FOLDER becomes a virtual environment in which torchrepro is installed as it is in this checkout,
next to torch and torch_npu from the package index. CANN, which torch_npu needs below it, is stood
in for: cann.cpp and kernels.cpp answer what a profile can reach and write it to a record, and
every other function that the wheel asks for is generated to do nothing. So dispatch, autograd,
generators and task queue are torch_npu's own, and what CANN is told can be read afterwards.

Needs g++, nm and ldd, about 1.5 GB, and about a minute; what is there already is used again.
"""

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUIREMENTS = ("torch==2.13.0", "torch_npu==2.13.0", "numpy", "packaging", "pytest", "hypothesis")
RUNTIME = "libascendcl.so"
KERNELS = "libopapi.so"
VARIABLES = "libgetenv.so"
SOURCES = sorted((*HERE.glob("*.cpp"), HERE / "record.h", HERE / "rig.py"))


def main(folder: Path) -> None:
    """Make `folder` the rig, or bring it up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        once(folder / "packages.stamp", "\n".join(REQUIREMENTS), lambda: install(folder))
        once(folder / "project.stamp", str(REPOSITORY), lambda: pip(folder, "-e", str(REPOSITORY)))
        sources = "".join(source.read_text(encoding="utf-8") for source in SOURCES)
        once(folder / "libraries.stamp", sources, lambda: stand_in(folder))


def once(stamp: Path, content: str, step: Callable[[], None]) -> None:
    """Do `step` unless `stamp` says that it was done for this `content`."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    step()
    stamp.write_text(digest, encoding="utf-8")


def install(folder: Path) -> None:
    """Make the virtual environment; refuses a folder that holds something else."""
    own = {"lock", "venv"}
    present = (path for path in folder.iterdir() if path.suffix != ".stamp")
    foreign = sorted(path.name for path in present if path.name not in own)
    if foreign:
        sys.exit(f"{folder} holds {foreign[0]}: name an empty folder, or a new one")
    for stamp in folder.glob("*.stamp"):
        stamp.unlink()
    venv.create(folder / "venv", with_pip=True, clear=True)
    pip(folder, *REQUIREMENTS)


def pip(folder: Path, *packages: str) -> None:
    """Install `packages` in the rig."""
    output(str(folder / "venv/bin/python"), "-m", "pip", "install", "-q", *packages)


def stand_in(folder: Path) -> None:
    """Build the libraries that torch_npu misses, where its wheel looks for them."""
    torch_npu = next(folder.glob("venv/lib/python*/site-packages/torch_npu"))
    libraries = torch_npu.with_name("torch_npu.libs")
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    wheel = sorted(torch_npu.rglob("*.so"))
    torch = sorted((torch_npu.with_name("torch") / "lib").glob("*.so*"))
    own = {path.name for path in (*wheel, *torch)}

    build = Compiler(torch_npu / "include", libraries)
    build.library(RUNTIME, [HERE / "cann.cpp"])
    defined = symbols([*wheel, *torch, libraries / RUNTIME], "--defined-only")
    rest = libraries / "rest.cpp"
    rest.write_text(doing_nothing(missing_functions(wheel, defined)), encoding="utf-8")
    build.library(RUNTIME, [HERE / "cann.cpp", rest])
    for name in missing_libraries(wheel) - own - {RUNTIME}:
        build.library(name, [], RUNTIME)  # torch_npu looks for functions of the runtime there
    build.library(KERNELS, [HERE / "kernels.cpp"], RUNTIME)
    build.library(VARIABLES, [HERE / "getenv.cpp"])


class Compiler:
    """Compiles against the headers that come with torch_npu."""

    def __init__(self, headers: Path, libraries: Path) -> None:
        inner = ("", "third_party/acl/inc", "third_party/hccl/inc")
        self.headers = [f"-I{HERE}", *(f"-I{headers / folder}" for folder in inner)]
        self.libraries = libraries

    def library(self, name: str, sources: Iterable[Path], *needs: str) -> None:
        """Make a shared library of `sources` that is known as `name`."""
        options = ["-std=c++17", "-O1", "-fPIC", "-w", "-shared", "-Wl,--no-as-needed"]
        named = [f"-Wl,-soname,{name}", "-o", str(self.libraries / name)]
        files = [str(source) for source in sources]
        linked = [str(self.libraries / library) for library in needs]
        output("g++", *options, *named, *self.headers, *files, *linked)


def missing_libraries(wheel: list[Path]) -> set[str]:
    """Return the names of the libraries that the loader does not find."""
    lines = [line for path in wheel for line in output("ldd", str(path)).splitlines()]
    return {line.split()[0] for line in lines if line.endswith("=> not found")}


def missing_functions(wheel: list[Path], defined: set[str]) -> set[str]:
    """Return the functions that the wheel calls and neither torch, the system nor we have.

    A name with a version after it belongs to the system's libraries.
    """
    present = ctypes.CDLL(None)
    wanted = symbols(wheel, "--undefined-only") - defined
    return {name for name in wanted if "@" not in name and not hasattr(present, name)}


def symbols(paths: Iterable[Path], which: str) -> set[str]:
    """Return the dynamic symbols of `paths`, weak ones left out."""
    lines = [
        line.split() for path in paths for line in output("nm", "-D", which, str(path)).splitlines()
    ]
    return {words[-1] for words in lines if len(words) > 1 and words[-2] != "w"}


def doing_nothing(names: Iterable[str]) -> str:
    """Return C++ for functions of these symbols that are recorded and return 0."""
    functions = (
        f'long nothing_{n}() __asm__("{name}");\n'
        f'long nothing_{n}() {{ return record("{name}"), 0; }}'
        for n, name in enumerate(sorted(names))
    )
    return "\n".join(['#include "record.h"', 'extern "C" {', *functions, "}", ""])


def output(*command: str) -> str:
    """Return what `command` prints; raises if it fails."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    if platform.system() != "Linux" or len(sys.argv) != 2:
        sys.exit("usage, on Linux: rig.py FOLDER")
    main(Path(sys.argv[1]).resolve())
