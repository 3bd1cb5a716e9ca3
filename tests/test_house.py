"""Why: rules that every file must keep are checked by reading the files, so that nobody has to remember them."""

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
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybridpar
from hybridpar import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridpar"

#: Who may import whom, from the ground up. A room is a module or a sub-package of hybridpar; what is not named here is
#: forbidden, also inside functions and under TYPE_CHECKING.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "process": set(),
    "registry": {"errors"},
    "config": {"errors"},
    "recipes": {"checkpoint", "compress", "config", "errors", "optim", "pipeline"},
    "models": {"errors"},
    "plan": {"errors"},
    "observe": {"errors", "pipeline"},
    "launch": {"errors", "process"},
    "lanes": {"errors"},
    "data": {"config", "errors", "registry"},
    "kernel_cache": {"cluster"},
    "kernel_build": {"kernel_cache"},
    "kernel_cuda": {"kernel_cache"},
    "compress": {"errors", "kernel_build", "kernel_cuda", "process", "registry"},
    "tvm_kernels": {"cluster", "errors", "kernel_build", "kernel_cache", "kernel_cuda", "process"},
    "partition": {"config", "errors", "models", "plan", "process", "registry"},
    "cluster": {"errors", "process"},
    "probe": {"cluster", "errors", "process"},
    "pipeline": {"compress", "errors", "lanes", "process", "registry"},
    "planner": {
        *("cluster", "compress", "errors", "lanes", "models", "partition", "pipeline", "plan", "probe", "process"),
        "tvm_kernels",
    },
    "plan_trials": {"config", "errors", "lanes", "pipeline", "plan", "trainer"},
    "plan_job": {
        *("config", "errors", "models", "partition", "pipeline", "plan", "plan_trials", "planner", "run"),
    },
    "optim": {"config", "errors"},
    "server": {"compress", "config", "errors", "launch", "optim", "pipeline", "process", "registry"},
    "checkpoint": {"errors", "pipeline"},
    "trainer": {
        *("checkpoint", "cluster", "compress", "config", "errors", "lanes", "models", "optim", "partition", "pipeline"),
        *("plan", "planner", "process", "recipes", "tvm_kernels"),
    },
    "rundir": {"checkpoint", "config", "errors", "observe"},
    "doctor": {"cluster", "errors", "probe", "process"},
    "run": {
        *("checkpoint", "cluster", "compress", "config", "data", "errors", "launch", "models", "observe", "optim"),
        *("pipeline", "plan", "planner", "process", "recipes", "rundir", "server", "trainer", "tvm_kernels"),
    },
    "show": {"errors", "observe", "partition", "pipeline", "plan"},
    "bench": {"compress", "config", "errors", "launch", "models", "optim", "pipeline", "process", "trainer"},
    "tune_command": {
        *(
            "cluster",
            "config",
            "data",
            "errors",
            "kernel_build",
            "kernel_cache",
            "models",
            "partition",
            "process",
            "trainer",
            "tvm_kernels",
        ),
    },
    "cli": {
        *("bench", "cluster", "config", "doctor", "errors", "launch", "partition", "plan", "plan_job", "planner"),
        *("run", "server", "show", "tune_command", "tvm_kernels"),
    },
    "__main__": {"cli", "launch"},
    "__init__": {"config", "errors", "partition", "plan", "recipes", "trainer"},
}

#: Modules that are one room, though they lie beside each other.
SHARED_ROOMS = {
    **dict.fromkeys(("lane_base", "lane_check", "lane_cpu", "lane_cuda", "lane_ops"), "lanes"),
    "cluster_file": "cluster",
    **dict.fromkeys(("server_config", "recipe_config"), "config"),
    "probe_worker": "probe",
    "cuda_driver": "kernel_cuda",
    **dict.fromkeys(("kernel_builder", "kernel_writer", "kernel_writer_cuda"), "kernel_build"),
    "checkup": "doctor",
    **dict.fromkeys(("run_server", "run_server_report", "run_server_state"), "run"),
    **dict.fromkeys(
        (
            *("run_data", "run_figures", "run_kernels", "run_memory", "run_plan", "run_position", "run_recipe"),
            *("run_sync", "run_timeline"),
        ),
        "run",
    ),
    **dict.fromkeys(("save_rule", "timings", "worker"), "run"),
    **dict.fromkeys(("buffer_engine", "evaluation", "local_engine", "planned_run", "replica_engine"), "trainer"),
    **dict.fromkeys(("run_inputs", "stage_engine", "staging", "step_result", "worker_share"), "trainer"),
}

#: What must answer without the seconds that torch takes.
WITHOUT_TORCH = ("errors", "registry", "config", "process", "plan", "cli", "launch", "cluster", "observe")

MOST_LINES = {"hybridpar": 450, "benchmarks": 400, "scripts": 300, "examples": 200, "docs": 300, "tests": 600}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    """The room of a module, called by its dotted name below hybridpar."""
    first = module.partition(".")[0]
    return SHARED_ROOMS.get(first, first)


def dotted(path: Path) -> str:
    """hybridpar/pipeline/sync.py -> pipeline.sync; a package's own __init__ is called by the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    place = PACKAGE / name.replace(".", "/")
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def nodes(tree: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """All nodes below a node; those inside of functions only where asked for."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from nodes(node, functions)


def imports(path: Path, functions: bool = True) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever the import stands, or only outside of functions."""
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively; the project does not"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                # `from hybridpar.data import sampling` imports a module, `... import Batch` a name.
                inside = full.startswith("hybridpar.") and is_module(full.removeprefix("hybridpar."))
                yield full if inside else str(node.module)


def own_imports(path: Path, functions: bool = True) -> set[str]:
    """Dotted names below hybridpar of the modules that a file imports."""
    names = [name.partition(".") for name in imports(path, functions)]
    return {rest or "__init__" for first, _, rest in names if first == "hybridpar"} - {dotted(path)}


@pytest.mark.parametrize("path", python_files("hybridpar"), ids=relative)
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(dotted(path))
    assert room in ROOMS, f"{relative(path)} is in no room yet: add a row to ROOMS that says what it may import"
    reached = {room_of(module) for module in own_imports(path)} - {room}
    forbidden = reached - ROOMS[room]
    assert not forbidden, f"{relative(path)} must not import {', '.join(sorted(forbidden))}"


def test_the_table_of_rooms_has_a_down() -> None:
    tuple(TopologicalSorter(ROOMS).static_order())  # raises where rooms could import each other in a circle
    unknown = {name for allowed in ROOMS.values() for name in allowed} - set(ROOMS)
    assert not unknown


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {dotted(path): own_imports(path, functions=False) for path in python_files("hybridpar")}
    tuple(TopologicalSorter(graph).static_order())


def test_the_reader_of_imports_sees_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from hybridpar.plan import Plan\n"
        "def later():\n    import hybridpar.run\n    from hybridpar.data import sampling, Batch\n"
    )
    assert set(imports(file)) == {
        "typing",
        "hybridpar.plan",
        "hybridpar.run",
        "hybridpar.data.sampling",
        "hybridpar.data",
    }


def test_only_one_file_imports_tvm() -> None:
    importing = {
        relative(path)
        for path in python_files("hybridpar")
        if any(name.partition(".")[0] in ("tvm", "tvm_ffi") for name in imports(path))
    }
    assert importing <= {"hybridpar/kernel_build.py"}


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
                assert declared.intersection(map(canonicalize_name, distributions.get(name, ()))), (
                    f"{relative(path)} imports {name}"
                )


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


@pytest.mark.parametrize("path", [path for path in PACKAGE.rglob("*") if path.is_dir()], ids=relative)
def test_every_folder_with_code_is_a_package(path: Path) -> None:
    assert (path / "__init__.py").exists() or not list(path.glob("*.py"))


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


@pytest.mark.parametrize("path", python_files("hybridpar", "benchmarks", "scripts", "examples", "docs"), ids=relative)
def test_files_say_why_they_exist(path: Path) -> None:
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if path != PACKAGE / "__init__.py":  # help(hybridpar) says what the package is
        assert header is not None
        assert header.startswith("Why: ")


@pytest.mark.parametrize("path", python_files(*MOST_LINES), ids=relative)
def test_files_have_one_idea(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES[path.relative_to(ROOT).parts[0]]


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


def train_options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every option that `hybridpar train --help` names."""
    monkeypatch.setenv("COLUMNS", "200")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    return re.findall(r"^\W*(?:-\w, )?(--[a-z][a-z-]*)", output.getvalue(), flags=re.MULTILINE)


def test_no_option_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = (ROOT / "tests/golden/train_options.txt").read_text().split()
    options = train_options(monkeypatch)
    assert len(options) > 30
    assert not set(golden) - set(options), "scripts of users name these; an option is not taken away by accident"
    assert not set(options) - set(golden), "add new options to tests/golden/train_options.txt"


def test_every_option_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    explained = set(re.findall(r"--[a-z][a-z-]*", guide))
    assert not set(train_options(monkeypatch)) - explained - {"--help"}


def test_ci_and_make_can_start() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"venv", "demo", "test", "lint", "bench", "gpu-check", "clean"} <= targets
