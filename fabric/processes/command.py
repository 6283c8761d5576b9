# SPDX-License-Identifier: Apache-2.0
"""The command that runs this program again, the way the user started it."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from fabric.processes.hydra import hydra_arguments

# Programs that run another one inside themselves. Ranks that we start are not debugged, profiled or measured.
_WRAPPERS = frozenset(
    {"bdb", "coverage", "cProfile", "debugpy", "ipdb", "kernprof", "line_profiler", "memory_profiler", "pdb", "profile"}
    | {"pudb", "pyinstrument", "runpy", "scalene", "trace", "viztracer"}
)
_TEST_RUNNERS = frozenset({"nose2", "py.test", "pytest", "unittest"})


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.path.sep


# Read as early as we can: the script may change them before it launches (Hydra changes the directory).
_START_DIRECTORY = _current_directory()
_START_SCRIPT = sys.argv[0] if getattr(sys, "argv", None) else ""


class Command(NamedTuple):
    """A program to start: its words, and the directory to start it in."""

    words: tuple[str, ...]
    directory: str


class Program(NamedTuple):
    """What Python tells about the running program.

    Args:
        executable: `sys.executable`.
        original: `sys.orig_argv`, the words of the whole command as they were at start.
        script: `sys.argv[0]` at the start.
        file: `__main__.__file__`.
        module: `__main__.__spec__.name`.
        directory: The directory at start, as far as we know it.
    """

    executable: str
    original: tuple[str, ...]
    script: str
    file: str | None
    module: str | None
    directory: str

    @classmethod
    def running(cls) -> "Program":
        """The program that runs now."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        return cls(
            executable=sys.executable or "",
            original=tuple(getattr(sys, "orig_argv", ())),
            script=_START_SCRIPT,
            file=getattr(main, "__file__", None),
            module=spec.name if spec is not None else None,
            directory=_START_DIRECTORY,
        )


class _Split(NamedTuple):
    """A Python command: the interpreter's flags, what it runs ("file", "module" or other), its name, and the rest."""

    flags: tuple[str, ...]
    kind: str
    target: str
    rest: tuple[str, ...]


def rebuild_command(program: Program | None = None) -> Command:
    """The command that starts `program` (default: the running one) again.

    The interpreter's flags and the arguments are those of the start, whatever the script has done to `sys.argv` since.
    Debuggers, profilers and the like around the program are left out.

    Raises:
        RuntimeError: Where the program cannot be run again: `python -c`, standard input, a notebook, a test runner.
    """
    program = program or Program.running()
    if not program.executable or not program.original:
        _refuse("runs in an interpreter that is embedded in another program")
    split = _split_command(program.original)
    directory = _start_directory(program, split)
    target, arguments = _locate(program, split, directory)
    arguments, directory = hydra_arguments(arguments, directory)
    return Command((program.executable, *split.flags, *target, *arguments), directory)


def _refuse(why: str) -> NoReturn:
    raise RuntimeError(
        f"`fabric.launch()` starts the other ranks by running this program again, but it {why}, which cannot be run"
        ' again. Run a file, `python main.py`, or pass a function: `Fabric(strategy="ddp_spawn").launch(fn)`.'
    )


def _split_command(words: Sequence[str]) -> _Split:
    """Read a command line as Python itself does."""
    flags: list[str] = []
    index = 1
    while index < len(words):
        word = words[index]
        if word == "-" or not word.startswith("-"):
            return _Split(tuple(flags), "file", word, tuple(words[index + 1 :]))
        if word.startswith("--"):
            width = 2 if word == "--check-hash-based-pycs" else 1
            flags += words[index : index + width]
            index += width
            continue
        letters, option = _split_flags(word)
        flags += [f"-{letters}"] if letters else []
        if option:
            attached = word[len(word.split(option, 1)[0]) + 1 :]
            value = attached or "".join(words[index + 1 : index + 2])
            index += 0 if attached else 1
            if option in "cm":
                return _Split(tuple(flags), {"c": "code", "m": "module"}[option], value, tuple(words[index + 1 :]))
            flags += [f"-{option}", value]
        index += 1
    return _Split(tuple(flags), "none", "", ())


def _split_flags(word: str) -> tuple[str, str]:
    """The flags of `-OuX` without a value (`-i` would keep a rank waiting for input), and the one that takes one."""
    for position, letter in enumerate(word):
        if letter in "cmWX":
            return word[1:position].replace("i", ""), letter
    return word[1:].replace("i", ""), ""


def _start_directory(program: Program, split: _Split) -> str:
    """Where the program was started: what Python put before a relative script name tells it best."""
    file = os.path.normpath(program.file) if program.file else ""
    ending = os.path.sep + os.path.normpath(split.target)
    if split.kind == "file" and os.path.isabs(file) and file.endswith(ending) and not os.path.isabs(split.target):
        return file[: -len(ending)] or os.path.sep
    return program.directory


def _locate(program: Program, split: _Split, directory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that name the user's program, and its arguments."""
    module, file = program.module, program.file
    _refuse_what_cannot_run_again(program, split)
    root = (module or "").partition(".")[0]
    if root in _WRAPPERS or (file and not module and _is_wrapper_file(file)):
        return _inside_wrapper(program.script, split.rest, directory)
    if module is not None and module != "__main__":
        name = module.removesuffix(".__main__")
        rest = split.rest if split.kind == "module" else _after(name, split.rest)
        if split.kind == "module" and split.target not in (name, module):
            rest = _after(name, split.rest)
        return ("-m", name), rest
    assert file is not None
    if split.kind == "file" and _is_program(split.target, file, directory):
        return (split.target,), split.rest
    return _inside_wrapper(file, split.rest, directory)


def _refuse_what_cannot_run_again(program: Program, split: _Split) -> None:
    root = (program.module or "").partition(".")[0]
    name = os.path.basename(program.file or "")
    if root in _TEST_RUNNERS or name in _TEST_RUNNERS:
        _refuse(f"runs inside `{root or name}`")
    if program.module not in (None, "__main__"):
        return
    if program.file is None and split.kind == "code":
        _refuse("was started with `python -c`")
    if program.file is None and split.target == "-":
        _refuse("was read from standard input")
    if program.file is None:
        _refuse("is a notebook, an interactive session or standard input")
    if not os.path.isfile(program.file) and not os.path.exists(os.path.dirname(program.file)):
        _refuse(f"was read from `{program.file}`, which is no file any more")
    if os.path.realpath(program.file).startswith(("/dev/", "/proc/")):
        _refuse(f"was read from `{program.file}`")


def _is_wrapper_file(file: str) -> bool:
    folder, name = os.path.split(file)
    return os.path.splitext(name)[0] in _WRAPPERS or (name == "__main__.py" and os.path.basename(folder) in _WRAPPERS)


def _is_program(target: str, file: str, directory: str) -> bool:
    """Whether `python target` is the program in `file`; a folder or an archive holds it as `__main__.py`."""
    path = os.path.realpath(os.path.join(directory, target))
    return os.path.realpath(file) in (path, os.path.join(path, "__main__.py"))


def _inside_wrapper(script: str, rest: tuple[str, ...], directory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The program and its arguments among the words that were given to a wrapper."""
    for index, word in enumerate(rest):
        if word == script and index and rest[index - 1] in ("-m", "--module"):
            return ("-m", word), rest[index + 1 :]
        if _is_program(word, os.path.join(directory, script), directory):
            return (word,), rest[index + 1 :]
    return (os.path.join(directory, script),), ()


def _after(name: str, rest: tuple[str, ...]) -> tuple[str, ...]:
    """The words after the module's name, in the words that were given to a wrapper."""
    names = [index for index, word in enumerate(rest) if word in (name, f"{name}.__main__")]
    return rest[names[0] + 1 :] if names else ()
