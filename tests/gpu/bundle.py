"""`make gpu-bundle`: what an offline GPU machine needs to run the GPU suite, in pieces that travel, in `.out/gpu`.

    site.tar.xz      vLLM for one kind of GPU, and every package that such a machine lacks (`carried.txt`)
    project.tar.xz   this project, as in the working tree: what git tracks or would
    model.00, ...    the bundled model's file in pieces that travel one at a time

`tests/gpu/stage.sh` unpacks them there. Needs the network, `strip` and `xz` here; one to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from zipfile import ZipFile

from explorer.models import fetch

from .prune import pruned

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
MOST = 64 * 2**20  # bytes that may travel at a time
PIECE = 48 * 2**20
PYTHON = "3.12"
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)  # pip matches each manylinux tag by itself
OTHERS = ("manylinux2014", "manylinux2010", "manylinux1")

# In vLLM's wheel: what a GPU suite of dense models loads. `_moe_C` would be 14 MB more.
LIBRARIES = ("_C", "_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C")
AS_IT_IS = ("cumem_allocator",)
STRIPPED = ("xgrammar", "tvm_ffi", "openai_harmony")  # large for their symbols; others may not survive it
# What nobody imports there.
LEFT_OUT = (
    *("pycountry/locales", "mistral_common/data", "supervisor", "xgrammar/lib", "xgrammar/include", "tvm_ffi/include"),
    *("bin", "vllm/third_party/deep_gemm", "vllm/vllm_flash_attn/cute", "vllm/benchmarks"),
)
LEFT_OUT_KINDS = (".a", ".jpg", ".pyc", "direct_url.json")  # the last says where on this machine a wheel lay


class BundleError(Exception):
    """What went wrong, in one line."""


def fetch_wheels(folder: Path) -> list[Path]:
    """The wheels of `carried.txt`, for the other machine's Python."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [line for line in (HERE / "carried.txt").read_text().split("\n") if line and not line.startswith("#")]
    pip("download", "--no-deps", "--dest", str(folder), *wanted)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(wanted):
        raise BundleError(f"{folder} holds {len(wheels)} wheels for {len(wanted)} requirements: remove it, try again")
    return wheels


def pip(command: str, *arguments: str) -> None:
    """pip, for the other machine's platform and Python."""
    tags = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + [f"{name}_x86_64" for name in OTHERS]
    platform = [word for tag in tags for word in ("--platform", tag)]
    line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    line += ["--python-version", PYTHON, "--implementation", "cp", *platform, *arguments]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BundleError(f"pip {command}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")


def install(wheels: Iterable[Path], site: Path, chip: int) -> None:
    """Unpack the wheels, vLLM's libraries for one kind of GPU, and drop what is not needed."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    vllm = next(wheel for wheel in wheels if wheel.name.startswith("vllm-"))
    rest = [str(wheel) for wheel in wheels if wheel is not vllm]
    pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(site), *rest)
    with ZipFile(vllm) as wheel:
        for name in wheel.namelist():
            if not (name.endswith(".so") or is_left_out(name)):
                wheel.extract(name, site)
        for library in LIBRARIES:
            name = f"vllm/{library}.abi3.so"
            (site / name).write_bytes(pruned(wheel.read(name), chip))
        for library in AS_IT_IS:
            wheel.extract(f"vllm/{library}.abi3.so", site)
    for package in STRIPPED:
        for path in (site / package).rglob("*.so"):
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def is_left_out(name: str) -> bool:
    """Whether a file, named from the site folder, stays here."""
    parts = name.split("/")
    return (
        name.startswith(tuple(f"{folder}/" for folder in LEFT_OUT))
        or name.endswith(LEFT_OUT_KINDS)
        or "tests" in parts
        or "__pycache__" in parts
        or parts[0].startswith("supervisor")
        or parts[-1].startswith("swagger-ui")
    )


def archive(target: Path, names: Iterable[tuple[Path, str]]) -> None:
    """Pack files under their names, compressed on all cores."""
    target.unlink(missing_ok=True)
    with target.open("wb") as out:
        packer = subprocess.Popen(["xz", "-6", "-T0", "-c"], stdin=subprocess.PIPE, stdout=out)
        assert packer.stdin is not None
        with tarfile.open(fileobj=packer.stdin, mode="w|") as tar:
            for path, name in names:
                tar.add(path, name, recursive=False)
        packer.stdin.close()
        if packer.wait():
            raise BundleError(f"xz ended with {packer.returncode} while it wrote {target.name}")


def pack_site(site: Path, target: Path) -> None:
    """The site folder as an archive."""
    files = ((path, path.relative_to(site).as_posix()) for path in sorted(site.rglob("*")) if path.is_file())
    archive(target, ((path, f"site/{name}") for path, name in files if not is_left_out(name)))


def pack_project(target: Path) -> None:
    """The working tree as it is: tracked files and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file())
    archive(target, ((ROOT / name, f"project/{name}") for name in names))


def pack_model(name: str, folder: Path) -> list[Path]:
    """The bundled model's file, cut into pieces that travel one at a time; `cat` puts them together."""
    for old in folder.glob("model.[0-9][0-9]"):
        old.unlink()
    pieces = []
    with fetch(name).open("rb") as file:
        while data := file.read(PIECE):
            piece = folder / f"model.{len(pieces):02}"
            piece.write_bytes(data)
            pieces.append(piece)
    return pieces


def main() -> int:
    """Build what is asked for and say what it weighs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".out" / "gpu")
    parser.add_argument("--chip", type=int, default=90, help="compute capability: 90 for H100 and H200, 80 for A100")
    asked = parser.parse_args()
    out: Path = asked.out.absolute()
    try:
        for program in ("strip", "xz", "git"):
            if shutil.which(program) is None:
                raise BundleError(f"{program} is not installed; the packages are called binutils, xz-utils and git")
        steps: dict[str, Callable[[], object]] = {
            "fetching wheels": lambda: wheels.extend(fetch_wheels(out / "work" / "wheels")),
            "unpacking": lambda: install(wheels, out / "work" / "site", asked.chip),
            "packing": lambda: pack_site(out / "work" / "site", out / "site.tar.xz"),
            "packing the project": lambda: pack_project(out / "project.tar.xz"),
            "cutting the model": lambda: pack_model("smollm2-135m", out),
        }
        wheels: list[Path] = []
        for what, step in steps.items():
            print(f"gpu-bundle: {what}", flush=True)
            step()
    except (BundleError, subprocess.CalledProcessError, OSError) as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    made = [out / "site.tar.xz", out / "project.tar.xz", *sorted(out.glob("model.[0-9][0-9]"))]
    for path in made:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")
    together = sum(path.stat().st_size for path in made[:2])
    print(f"{together / 2**20:6.1f} MiB  site and project together; at most {MOST / 2**20:.0f} travel at a time")
    return int(together > MOST)


if __name__ == "__main__":
    sys.exit(main())
