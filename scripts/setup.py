"""Set up `.venv`: `python3 -S scripts/setup.py [EXTRA …]`, which every `make` target runs first.

It uses the standard library only, and the syntax of old Pythons, so that an old Python prints a sentence instead of a
traceback. A torch that already sees the GPU (Docker image, conda, an active venv) is used as it is; otherwise the one
pinned in constraints.txt is installed. A second call only compares a hash and returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, NamedTuple  # noqa: UP035 — collections.abc.Iterator has no [] before Python 3.9

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".redline-stamp"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_PYTHON = (3, 11)
TRITON = "triton==3.6.0"  # its interpreter runs the kernels' tests on a CPU; CUDA builds of torch bring their own
CUDA_12_WHEELS = "cu126"  # CUDA is compatible within a major version: these run on every driver for CUDA 12.x

PROBE = """
import importlib.util as find, json, sys
about = dict(version=sys.version_info[:3], prefix=sys.prefix, base_prefix=sys.base_prefix,
             ensurepip=bool(find.find_spec("venv") and find.find_spec("ensurepip")))
try:
    import pathlib, torch
    about.update(torch=torch.__version__, cuda=torch.version.cuda, sees_gpu=torch.cuda.is_available(),
                 site_packages=str(pathlib.Path(torch.__file__).parent.parent))
except Exception:  # torch is missing or broken; either way it cannot train
    pass
print(json.dumps(about))
"""


class SetupError(Exception):
    """A message for the user, with the fix."""


class Interpreter(NamedTuple):
    """A Python interpreter and its torch."""

    path: str
    version: tuple[int, ...]
    prefix: str = ""
    base_prefix: str = ""
    ensurepip: bool = True
    torch: str | None = None
    cuda: str | None = None
    sees_gpu: bool = False
    site_packages: str = ""


class Driver(NamedTuple):
    """What nvidia-smi reports; `trouble` is its first line if it fails."""

    gpu: str = ""
    version: str = ""
    cuda: str = ""
    trouble: str = ""


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.11.0a0+nv25.12 → (2, 11, 0).

    Vendors name their builds as previews of the release that they contain.
    """
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def reusable(pythons: list[Interpreter], pyproject: str) -> Interpreter | None:
    """Return the first interpreter whose torch is in the range of pyproject.toml and sees the GPU."""
    match = re.search(r'"torch>=([\d.]+),<([\d.]+)"', pyproject)
    if not match:
        raise SetupError('pyproject.toml: the torch requirement must read "torch>=X,<Y".')
    lowest, below = parse_version(match[1]), parse_version(match[2])
    for python in pythons:
        fits = lowest <= parse_version(python.torch or "") < below
        if fits and python.cuda and python.sees_gpu and python.version >= OLDEST_PYTHON:
            return python
    return None


def stamp_text(root: Path, extras: frozenset[str]) -> str:
    """Return a text that changes with everything .venv is made from, and with its path, which its scripts contain."""
    parts = [str(root).encode(), (root / "pyproject.toml").read_bytes(), (root / "constraints.txt").read_bytes()]
    return " ".join([hashlib.sha256(b"|".join(parts)).hexdigest(), *sorted(extras)]) + "\n"


def stamped_extras(stamp: str) -> frozenset[str]:
    """Return the installed extras; later set-ups add to them and remove none."""
    return frozenset(stamp.split()[1:])


def is_ready(stamp: str, root: Path, extras: frozenset[str]) -> bool:
    """Return whether .venv is up to date and has these extras, or more."""
    return extras <= stamped_extras(stamp) and stamp == stamp_text(root, stamped_extras(stamp))


def venv_serves(config: str, venv: Path, reuse: Interpreter | None) -> bool:
    """Return whether an existing .venv can be kept, by its pyvenv.cfg; otherwise it must be made anew."""
    pairs = (line.split("=", 1) for line in config.splitlines() if "=" in line)
    settings = {key.strip(): value.strip() for key, value in pairs}
    made_here = settings.get("command", str(venv)).endswith(str(venv))
    if reuse is None:
        return made_here and settings.get("include-system-site-packages") == "false"
    same_base = Path(settings.get("home", "")).parent == Path(reuse.base_prefix)
    return made_here and same_base and settings.get("include-system-site-packages") == "true"


def pin_torch(constraints: str, version: str) -> str:
    return re.sub(r"(?m)^torch==.*$", f"torch=={version}", constraints)


def offered(pyproject: str) -> frozenset[str]:
    """Return the names of the extras."""
    import tomllib  # new in Python 3.11; main() must be able to report an older one

    return frozenset(tomllib.loads(pyproject)["project"]["optional-dependencies"])


def install_steps(
    pyproject: str, extras: frozenset[str], reuse: Interpreter | None, constraints: Path
) -> list[list[str]]:
    """Return the arguments of `pip install`, one list for each call."""
    if reuse is None:
        return [["-c", str(constraints), "-e", f".[{','.join(sorted(extras))}]" if extras else "."]]
    import tomllib  # new in Python 3.11; main() must be able to report an older one

    project = tomllib.loads(pyproject)["project"]
    # uv does not see packages outside the venv and would install a second torch, so torch is left out.
    optional = project["optional-dependencies"]
    wanted = project["dependencies"] + [item for extra in sorted(extras) for item in optional[extra]]
    others = [item for item in wanted if not re.match(r"torch\b(?!-)", item)]
    return [["-c", str(constraints), *others], ["--no-deps", "-e", "."]]


def interpreter_steps(extras: frozenset[str], reuse: Interpreter | None, venv: Path) -> list[list[str]]:
    """Return the installation of Triton, which the tests need where torch came without it."""
    installed = reuse is not None or any(venv.glob("lib/python3*/site-packages/triton-*.dist-info"))
    return [[TRITON]] if "dev" in extras and not installed and sys.platform == "linux" else []


def parse_driver(smi: str, gpus: str) -> Driver:
    """Parse the outputs of `nvidia-smi` and `nvidia-smi -L`."""
    version = re.search(r"Driver Version\s*:\s*([\d.]+)", smi)
    cuda = re.search(r"CUDA(?: \w+)? Version\s*:\s*(\d+\.\d+)", smi)
    gpu = re.search(r"GPU \d+: (.+?) \(UUID", gpus)
    return Driver(gpu[1] if gpu else "", version[1] if version else "", cuda[1] if cuda else "")


def gpu_advice(driver: Driver | None, python: Interpreter) -> str:
    """Return why torch cannot use the GPU, and the fix; "" if nothing is wrong."""
    if driver is None or python.sees_gpu or not (driver.gpu or driver.trouble):
        return ""
    torch = f"torch {python.torch}"
    if driver.trouble:
        advice = f"nvidia-smi fails: {driver.trouble} After a driver update, reboot; a container needs `--gpus all`."
    elif not python.cuda:
        advice = (
            f"There is a GPU ({driver.gpu}), but {torch} is a CPU build. See that pip's find-links (PIP_FIND_LINKS) "
            "offers no CPU wheel, then run `rm -rf .venv && UV_TORCH_BACKEND=auto make setup`."
        )
    elif driver.cuda and parse_version(driver.cuda)[0] < parse_version(python.cuda)[0]:
        older = f", or run `rm -rf .venv && UV_TORCH_BACKEND={CUDA_12_WHEELS} make setup`"
        advice = (
            f"Driver {driver.version} ({driver.gpu}) supports CUDA {driver.cuda}, but {torch} was built for CUDA "
            f"{python.cuda}. Update the NVIDIA driver{older if driver.cuda.startswith('12.') else ''}."
        )
    else:
        advice = (
            f"{torch} does not see the GPU ({driver.gpu}), though driver {driver.version} fits. Check "
            "CUDA_VISIBLE_DEVICES; a container needs `--gpus all`."
        )
    return advice + " Until then training runs on the CPU."


def probe(python: str) -> Interpreter | None:
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=180)
        about = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    return Interpreter(path=python, **dict(about, version=tuple(about["version"])))


def active_pythons() -> list[str]:
    """Return the active environments' interpreters, then the running one, without that of .venv itself."""
    places = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    pythons = [f"{place}/bin/python" for place in places if place]
    pythons += [sys.executable, getattr(sys, "_base_executable", sys.executable)]
    others = [python for python in pythons if Path(python).parent != VENV / "bin" and Path(python).exists()]
    return list(dict.fromkeys(others))


def read_driver() -> Driver | None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    try:
        outputs = [subprocess.run([smi, *more], capture_output=True, text=True, timeout=60) for more in ([], ["-L"])]
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(trouble=f"{error}.")
    if outputs[0].returncode:
        output = (outputs[0].stdout + outputs[0].stderr).strip() or f"exit status {outputs[0].returncode}."
        return Driver(trouble=output.splitlines()[0])
    return parse_driver(outputs[0].stdout, outputs[1].stdout)


def find_links() -> list[str]:
    """Return pip's find-links as options for uv, which does not read pip's settings."""
    ask = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    places = os.environ.get("PIP_FIND_LINKS") or subprocess.run(ask, capture_output=True, text=True).stdout
    return [f"--find-links={place}" for place in places.split()]


@contextmanager
def phase(title: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"  {title} ", end="", flush=True)
    yield
    print(f"({time.monotonic() - start:.1f} s)", flush=True)


def logged(command: list[str]) -> bool:
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def make_venv(base: Interpreter, reuse: Interpreter | None) -> None:
    config = VENV / "pyvenv.cfg"
    if VENV_PYTHON.exists() and config.exists() and venv_serves(config.read_text(), VENV, reuse):
        return
    uv = uv_on_path()
    if not uv and not base.ensurepip:
        package = f"python{base.version[0]}.{base.version[1]}-venv"
        raise SetupError(f"{base.path} cannot make virtual environments; on Debian and Ubuntu, install {package}.")
    options = ["--clear", "--without-pip"] + (["--system-site-packages"] if reuse else [])  # `install` adds pip
    done = subprocess.run([base.path, "-m", "venv", *options, str(VENV)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{base.path} could not make .venv: {(done.stderr or done.stdout).strip()}")
    if reuse and reuse.prefix != reuse.base_prefix:
        # A venv made from a venv is linked to the base interpreter: name the active one's packages ourselves.
        own = next((VENV / "lib").glob("python3*/site-packages"))
        (own / "redline-active-environment.pth").write_text(reuse.site_packages + "\n")


def uv_on_path() -> str | None:
    """Return uv, which installs several times faster than pip; None with `UV=none`."""
    return None if os.environ.get("UV") == "none" else shutil.which("uv")


def install(steps: list[list[str]]) -> str:
    """Install the packages, by uv if it is available, else by pip; return the installer's name.

    uv does not compile byte code here: most of torch's modules are never imported, and Python compiles the others at
    their first import. Compiling all of them took 11 of 18 s.
    """
    own_uv, uv = VENV / "bin" / "uv", uv_on_path()
    pip = ["-m", "pip", "--disable-pip-version-check"]
    # The running Python's own pip serves .venv, too, and saves the 3 s in which ensurepip unpacks another.
    bootstrap = [sys.executable, *pip, "--python", str(VENV_PYTHON), "install", "uv", "pip"]
    if not uv and os.environ.get("UV") != "none" and (own_uv.exists() or logged(bootstrap)):
        uv = str(own_uv)
    if uv and all(logged([uv, "pip", "install", f"--python={VENV_PYTHON}", *find_links(), *step]) for step in steps):
        return "uv"
    has_pip = logged([str(VENV_PYTHON), *pip, "--version"])
    if not has_pip:
        logged([str(VENV_PYTHON), "-m", "ensurepip"])
    if all(logged([str(VENV_PYTHON), *pip, "install", *step]) for step in steps):
        return "pip"
    print("", *LOG.read_text(errors="replace").splitlines()[-15:], sep="\n")
    raise SetupError(f"the packages could not be installed, for the reason above; the whole log is {LOG}.")


def set_up(extras: frozenset[str]) -> None:
    start, pyproject, constraints = time.monotonic(), (ROOT / "pyproject.toml").read_text(), CONSTRAINTS
    with phase("looking for a torch that sees a GPU"):
        pythons = [python for python in map(probe, active_pythons()) if python]
        if not pythons:
            raise SetupError(f"{sys.executable} does not run; choose another with `make setup PYTHON=…`.")
        reuse = reusable(pythons, pyproject)
    with phase(f".venv around torch {reuse.torch} of {reuse.prefix}" if reuse else ".venv"):
        make_venv(reuse or pythons[-1], reuse)
        STAMP.unlink(missing_ok=True)
        LOG.write_text("")
        if reuse:
            constraints = VENV / "constraints.txt"
            constraints.write_text(pin_torch(CONSTRAINTS.read_text(), str(reuse.torch)))
    with phase(" with ".join(filter(None, ["packages", ", ".join(sorted(extras))]))):
        print(f"by {install(install_steps(pyproject, extras, reuse, constraints))} ", end="")
        if steps := interpreter_steps(extras, reuse, VENV):
            install(steps)
    driver = read_driver()
    if driver is not None:
        with phase("asking torch for the GPU"):
            python = probe(str(VENV_PYTHON))
        advice = gpu_advice(driver, python) if python else ""
        print(f"\n{advice}\n" if advice else "", end="")
    STAMP.write_text(stamp_text(ROOT, extras))
    print(f"  ready in {time.monotonic() - start:.0f} s: .venv/bin/redline")


def main(arguments: list[str]) -> None:
    extras, stamp = frozenset(arguments), STAMP.read_text() if VENV_PYTHON.exists() and STAMP.exists() else ""
    if is_ready(stamp, ROOT, extras):
        return
    try:
        if sys.version_info[:2] < OLDEST_PYTHON:
            raise SetupError(f"Python {sys.version.split()[0]} is older than 3.11: try again with PYTHON=python3.12.")
        known = offered((ROOT / "pyproject.toml").read_text())
        if unknown := sorted(extras - known):
            raise SetupError(f"there is no extra {unknown[0]!r}; there are {', '.join(sorted(known))}.")
        set_up(extras | (stamped_extras(stamp) & known))
    except SetupError as error:
        sys.exit(f"\nset-up: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
