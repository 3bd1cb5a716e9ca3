"""Tests rules for the whole package that ruff cannot check: layers, dependencies, public names, options."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.resources
import io
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybridpar
from hybridpar import cli
from tests.structure import (
    LAYERS,
    PACKAGE,
    ROOT,
    dotted,
    imports,
    layer_of,
    modules,
    own_imports,
    python_files,
    relative,
)

#: What must answer without the seconds that torch takes.
WITHOUT_TORCH = (
    *(
        "errors",
        "registry",
        "config",
        "cli",
        "commands",
        "machine.process",
        "machine.launch",
        "machine.devices",
        "observe",
        "plan",
        "run.runs",
    ),
    "schedule",
)


def test_imports_go_down_only() -> None:
    for path in python_files("hybridpar"):
        layer = layer_of(dotted(path))
        assert layer in LAYERS, f"{relative(path)} is in no layer yet: add a row to LAYERS that says what it may import"
        forbidden = {layer_of(module) for module in own_imports(path)} - {layer} - LAYERS[layer]
        assert not forbidden, f"{relative(path)} must not import {', '.join(sorted(forbidden))}"


def test_layers_are_in_order() -> None:
    below: set[str] = set()
    for layer, allowed in LAYERS.items():
        assert allowed <= below, f"{layer} may import {', '.join(sorted(allowed - below))}, which stands above it"
        below.add(layer)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    tuple(TopologicalSorter(modules()).static_order())  # raises CycleError; imports inside functions count


#: Projects by the name of what they install, where that is another one and they may be missing.
PROJECTS = {"mlflow": "mlflow-skinny"}


def requirements() -> dict[str, list[Requirement]]:
    """Requirements by extra; those without are under the empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in lists.items()}


def test_what_is_imported_is_a_dependency() -> None:
    declared = {canonicalize_name(requirement.name) for listed in requirements().values() for requirement in listed}
    distributions = importlib.metadata.packages_distributions()
    for path in python_files("hybridpar", "benchmarks"):
        for name in {name.partition(".")[0] for name in imports(path)} - {"hybridpar", "benchmarks"}:
            if name not in sys.stdlib_module_names:
                assert declared.intersection(
                    map(canonicalize_name, distributions.get(name, [PROJECTS.get(name, name)]))
                ), f"{relative(path)} imports {name}"


def test_constraints_pin_every_dependency_to_a_version_it_allows() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    for listed in requirements().values():
        for requirement in listed:
            if requirement.name != "hybridpar":
                assert requirement.name in pinned, f"constraints.txt does not pin {requirement.name}"
                assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == hybridpar.__version__


def test_types_are_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["hybridpar"]
    assert importlib.resources.files("hybridpar").joinpath("py.typed").is_file()


def test_public_names_are_not_modules_names() -> None:
    modules = {path.stem for path in python_files("hybridpar")} | {
        path.parent.name for path in PACKAGE.rglob("__init__.py")
    }
    packages = [dotted(path) for path in PACKAGE.rglob("__init__.py")]
    for name in packages:
        package = hybridpar if name == "__init__" else importlib.import_module(f"hybridpar.{name}")
        taken = modules.intersection(getattr(package, "__all__", ()))
        assert not taken, f"{package.__name__} exports {', '.join(sorted(taken))}, also the name of a module"


def test_all_public_names_can_be_had() -> None:
    for name in hybridpar.__all__:
        assert getattr(hybridpar, name) is not None
    assert set(hybridpar.__all__) <= set(dir(hybridpar))
    with pytest.raises(AttributeError, match="no attribute 'Trainor'"):
        _ = hybridpar.Trainor


@pytest.mark.parametrize("package", [hybridpar, hybridpar.partition, hybridpar.tvm_kernels])
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(package) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    names = sorted(alias.name for node in imports for alias in node.names)
    assert names == sorted({*package.__all__} - {"__version__"})
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_sub_packages_are_loaded_when_they_are_first_used() -> None:
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert {"compress", "data", "partition", "pipeline", "planner", "server", "tvm_kernels"} <= set(packages)
    named = f"import hybridpar\nassert {set(packages)!r} <= set(dir(hybridpar))"
    assert "torch" not in loaded_after(named)
    used = "\n".join(f"assert hybridpar.{name}.__name__ == 'hybridpar.{name}'" for name in packages)
    without_compiler = "from hybridpar.machine.launch import import_torchvision\nimport_torchvision()"
    loaded_after(f"{without_compiler}\nimport hybridpar\n{used}")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a new interpreter has loaded after some code."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_looking_costs_nothing() -> None:
    modules = ", ".join(f"hybridpar.{name}" for name in WITHOUT_TORCH)
    code = (
        f"import hybridpar, {modules}\n"
        "try:\n    hybridpar.cli.main(['--help'])\n"
        "except SystemExit as left:\n    assert not left.code, left.code"
    )
    assert not loaded_after(code) & {"torch", "torchvision", "tvm", "matplotlib", "sklearn", "tensorboard"}


def test_listing_the_commands_imports_no_large_package() -> None:
    large = {"torch", "torchvision", "numpy", "pydantic", "rich", "networkx", "matplotlib", "sklearn", "tvm"}
    found = loaded_after("from hybridpar.cli import main\nassert main(['--help']) == 0") & large
    assert not found, f"a file in hybridpar/commands/ imports {found}; import it in the function that does the work"
    assert not loaded_after("import hybridpar") & {*large, "tyro"}


def train_options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every option that `hybridpar train --help-all` names."""
    monkeypatch.setenv("COLUMNS", "120")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    return re.findall(r"^\W*(?:-\w, )?(--[a-z][a-z-]*)", output.getvalue(), flags=re.MULTILINE)


def test_no_option_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = (ROOT / "tests/golden/train_options.txt").read_text().split()
    options = train_options(monkeypatch)
    assert len(options) > 30
    assert not set(golden) - set(options), "scripts of users name these; an option is not taken away by accident"
    assert not set(options) - set(golden), "add new options to tests/golden/train_options.txt"


def test_every_option_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "names.md"]
    explained = set(re.findall(r"--[a-z][a-z-]*", " ".join(pages)))
    assert not set(train_options(monkeypatch)) - explained - {"--help"}


def test_ci_and_make_can_start() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"venv", "demo", "test", "lint", "bench", "gpu-check", "clean"} <= targets
