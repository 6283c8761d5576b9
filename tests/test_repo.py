# SPDX-License-Identifier: Apache-2.0
"""The repository as a whole: its layout, what importing costs, and that what it says of itself is true."""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fabric

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fabric"
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "fabric.") if not m.name.endswith("__main__"))
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
SOURCES = sorted(
    path for folder in ("fabric", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

# Names that programs import, by the module that they import them from.
NAMES = {
    "fabric": "Fabric seed_everything is_wrapped __version__",
    "fabric.strategies": "Strategy ParallelStrategy SingleDeviceStrategy DataParallelStrategy DDPStrategy"
    " STRATEGY_REGISTRY",
    "fabric.accelerators": "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator ACCELERATOR_REGISTRY",
    "fabric.accelerators.cuda": "find_usable_cuda_devices",
    "fabric.plugins": "Precision MixedPrecision HalfPrecision DoublePrecision CheckpointIO TorchCheckpointIO",
    "fabric.plugins.precision": "Precision MixedPrecision HalfPrecision DoublePrecision",
    "fabric.plugins.precision.amp": "MixedPrecision",
    "fabric.plugins.io": "CheckpointIO TorchCheckpointIO",
    "fabric.plugins.environments": "ClusterEnvironment LightningEnvironment TorchElasticEnvironment",
    "fabric.loggers": "Logger CSVLogger TensorBoardLogger WandbLogger MLFlowLogger CometLogger AimLogger ClearMLLogger"
    " TrackioLogger SwanLabLogger",
    "fabric.loggers.logger": "Logger",
    "fabric.utilities": "rank_zero_only rank_zero_warn rank_zero_info move_data_to_device convert_tensors_to_scalars"
    " suggested_max_num_workers has_len has_iterable_dataset AttributeDict Throughput ThroughputMonitor measure_flops",
    "fabric.utilities.throughput": "Throughput ThroughputMonitor measure_flops get_available_flops",
    "fabric.utilities.spike": "SpikeDetection",
    "fabric.utilities.rank_zero": "rank_zero_only rank_zero_warn rank_zero_info",
    "fabric.utilities.apply_func": "move_data_to_device convert_tensors_to_scalars",
    "fabric.utilities.data": "suggested_max_num_workers has_len has_iterable_dataset AttributeDict",
    "fabric.utilities.cloud_io": "get_filesystem",
    "fabric.utilities.types": "Optimizable LRScheduler",
    "fabric.utilities.seed": "seed_everything reset_seed pl_worker_init_function",
    "fabric.utilities.distributed": "DistributedSamplerWrapper",
    "fabric.utilities.exceptions": "MisconfigurationException",
    "fabric.utilities.warnings": "PossibleUserWarning disable_possible_user_warnings",
    "fabric.wrappers": "_FabricModule _FabricOptimizer _FabricDataLoader _unwrap_objects",
}

# Importing one of these costs as much as importing torch.
HEAVY = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
HEAVY += ("torch.distributed.pipelining", "torch._dynamo", "torch._inductor", "fsspec")


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_layout() -> None:
    folders = "accelerators checkpoint cli data debugging evaluation facade loggers plan plugins processes strategies"
    folders += " utilities watching wrappers"
    files = "README.md CHANGELOG.md CONTRIBUTING.md LICENSE pyproject.toml constraints.txt .ci/run fabric/py.typed"
    missing = [name for name in folders.split() if not (PACKAGE / name).is_dir()]
    missing += [name for name in files.split() if not (ROOT / name).is_file()]
    assert missing == []
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="links may be plain files on Windows")
@pytest.mark.parametrize("name", ["strategies", "plugins"])
def test_the_links_at_the_root(name: str) -> None:
    assert os.readlink(ROOT / name) == f"fabric/{name}"


def test_importing_fabric_and_its_command_does_not_import_torch() -> None:
    after = modules_after("import fabric, fabric.cli, fabric.processes")
    assert "fabric.cli" in after
    assert after & {"torch", "numpy", "fsspec", "lightning_utilities"} == set()


def test_importing_the_fabric_class_imports_nothing_heavy_beyond_torch() -> None:
    torch_alone = modules_after("import torch")
    after = modules_after("from fabric import Fabric, seed_everything, is_wrapped")
    assert {module for module in after - torch_alone if module.startswith(HEAVY)} == set()


def test_the_names_that_programs_import() -> None:
    missing = [
        f"{module}.{name}"
        for module, names in NAMES.items()
        for name in names.split()
        if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_all_lists_what_a_package_exports(folder: Path) -> None:
    package = ".".join(folder.relative_to(ROOT).parts)
    tree = ast.parse((folder / "__init__.py").read_text())
    exported = {name for name in _bound_names(tree, package) if not name.startswith("_")}
    listed = getattr(importlib.import_module(package), "__all__", [])
    assert exported <= set(listed)
    assert [name for name in listed if not hasattr(importlib.import_module(package), name)] == []
    assert len(set(listed)) == len(listed)


def _bound_names(tree: ast.Module, package: str) -> set[str]:
    """What a package's `__init__.py` defines, or imports from the package itself."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_source_file_names_its_licence() -> None:
    first = "# SPDX-License-Identifier: Apache-2.0"
    assert [str(path) for path in SOURCES if not path.read_text().startswith(first)] == []


def test_sources_and_docs_are_ascii_but_for_tree_lines() -> None:
    assert [str(path) for path in SOURCES if not path.read_text(encoding="utf-8").isascii()] == []


def readme_commands() -> list[str]:
    return re.findall(r"^pip install -c constraints\.txt .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


def test_readme_has_two_commands_and_ci_reads_them_from_there() -> None:
    train, test = readme_commands()
    assert "examples/gpt/main.py" in train
    assert test.endswith("pytest -n 3")
    assert "grep '^pip install -c constraints.txt ' README.md" in (ROOT / ".ci" / "run").read_text()


def test_readme_begins_with_a_diff_of_at_most_ten_lines() -> None:
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert diff is not None
    assert len([line for line in diff[1].splitlines() if line.startswith(("+", "-"))]) <= 10


def test_readme_shows_the_strategy_of_the_example() -> None:
    example = (ROOT / "examples" / "custom_strategy" / "main.py").read_text()
    strategy = example[example.index("class LocalSGD") : example.index("def spirals")].strip()
    assert strategy in (ROOT / "README.md").read_text()
    assert strategy.count("\n") < 30


def test_what_the_project_needs_is_pinned() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [
        line for line in pins if not re.fullmatch(r'[a-z0-9-]+==[0-9][a-z0-9.]*( ; python_version >= "3\.11")?', line)
    ] == []
    pinned = {line.partition("==")[0] for line in pins}
    needed = re.findall(r'"([a-z0-9-]+)>=', (ROOT / "pyproject.toml").read_text())
    assert set(needed) >= {"torch", "numpy", "pytest", "ruff", "mypy", "wandb"}
    assert set(needed) - pinned == {"aim"}  # which is not among all extras, since it does not install everywhere


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_version_is_a_plain_string() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", fabric.__version__)
