"""Checks of a release: `python .github/check_release.py --tag v0.1.0`, `python .github/check_release.py --dist dist`.

The tag is the version that pyproject.toml, the package and CITATION.cff name; the wheel holds the two packages and nothing
else, the source archive no run, cache or result of a build; the wheel alone, in an environment of its own, answers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"truebatch", "truebatch_systems"}
UNWANTED = re.compile(r"/(\.git|\.venv|runs|carry|artefacts|\.real|\.triton|__pycache__|_build)/|\.log$")


def versions() -> dict[str, str]:
    """The version that each file names."""
    source = (ROOT / "src/truebatch/__init__.py").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    return {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "src/truebatch/__init__.py": re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0],
        "CITATION.cff": re.findall(r"^version: (.+)$", citation, re.MULTILINE)[0],
    }


def problems_of_tag(tag: str) -> list[str]:
    """Files that name another version than the tag."""
    return [f"{file} names {version}, the tag is {tag}" for file, version in versions().items() if tag != f"v{version}"]


def problems_of_archives(folder: Path) -> list[str]:
    """What is in the archives and should not be, and the other way round."""
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [f"{folder} holds {len(wheels)} wheels and {len(sources)} source archives, not one of each"]
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = wheel.namelist()
    with tarfile.open(sources[0]) as source:
        outside = source.getnames()
    tops = {name.partition("/")[0] for name in inside if ".dist-info/" not in name}
    found = [f"the wheel holds {tops}, not {PACKAGES}"] if tops != PACKAGES else []
    found += [f"the wheel lacks {name}" for name in ("truebatch/py.typed",) if name not in inside]
    found += [f"the source archive holds {name}" for name in outside if UNWANTED.search(f"/{name}")]
    top = outside[0].partition("/")[0]
    wanted = ("pyproject.toml", "README.md", "LICENSE", "src/truebatch/__init__.py", "tests/test_readme.py")
    return found + [f"the source archive lacks {name}" for name in wanted if f"{top}/{name}" not in outside]


def answer_of_wheel(folder: Path) -> str:
    """The version that the installed wheel's command tells, in an environment that holds nothing else."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python = Path(place) / "bin/python"
        constraints = ["-c", str(ROOT / "constraints.txt")]
        wheel = str(next(folder.glob("*.whl")).resolve())
        subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, "torch", wheel], check=True, cwd=place)
        told = subprocess.run(
            [python, "-m", "truebatch", "--version"], check=True, capture_output=True, text=True, cwd=place
        )
        return told.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag of the release")
    parser.add_argument("--dist", type=Path, help="the folder of wheel and source archive")
    options = parser.parse_args()
    found = problems_of_tag(options.tag) if options.tag else []
    if options.dist:
        found += problems_of_archives(options.dist)
        told = answer_of_wheel(options.dist)
        found += [] if versions()["pyproject.toml"] in told else [f"the wheel's command says {told!r}"]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
