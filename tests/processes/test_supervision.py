# SPDX-License-Identifier: Apache-2.0
"""What a supervised script may do, and what happens then. No collectives here, so the scripts do without torch."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.processes.jobs import Job, fabric_run, python, script

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")]

ROOT = str(Path(__file__).parents[2])
HOST = socket.gethostname()
START = """
import asyncio, atexit, os, signal, subprocess, sys, threading, time
from pathlib import Path
from tests.processes.mini import LAUNCHED, launch

def say(name, text="yes"):
    Path(name + ".new").write_text(str(text))
    os.rename(name + ".new", name)

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)

"""


def begin(folder: Path, text: str, *, way: str = "python", **environ: str) -> Job:
    body = "\n".join(line[4:] for line in text.splitlines())
    path = script(folder, START + body)
    environ = {"PYTHONPATH": ROOT, **environ}
    if way == "python":
        return python(path, folder=folder, environ=environ)
    return fabric_run("--devices", "2", path, folder=folder, environ=environ)


WAYS = pytest.mark.parametrize("way", ["python", "fabric run"])


@WAYS
def test_rank_0_waits_for_the_others_at_the_end(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        text="""
    if launch() == 1:
        wait_for("rank 0 has ended")
        time.sleep(0.3)
        say("rank 1 has ended")
    else:
        say("rank 0 has ended")
    """,
    )
    assert job.wait() == 0
    assert job.said("rank 1 has ended") == "yes"
    assert job.stderr == ""


@WAYS
def test_a_rank_that_fails_after_rank_0_has_ended(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        text="""
    if launch() == 1:
        wait_for("rank 0 has ended")
        time.sleep(0.3)
        os._exit(5)
    atexit.register(say, "rank 0 has ended")
    """,
    )
    assert job.wait() == 5
    assert job.last_line.endswith("failed first: exit code 5. All ranks have ended.")


@WAYS
@pytest.mark.parametrize("rank", [0, 1])
def test_the_exit_code_of_sys_exit(tmp_path: Path, way: str, rank: int) -> None:
    job = begin(
        tmp_path,
        way=way,
        RANK_TO_EXIT=str(rank),
        text="""
    if launch() == int(os.environ["RANK_TO_EXIT"]):
        sys.exit(3)
    """,
    )
    assert job.wait() == 3


def test_finally_has_a_second(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    if launch() == 1:
        raise ValueError("boom")
    try:
        time.sleep(60)
    finally:
        say("finally")
        time.sleep(60)
    """,
    )
    started = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - started < 10
    assert job.said("finally") == "yes"
    assert job.last_line.endswith("failed first: ValueError: boom (exit code 1). All ranks have ended.")


def test_a_swallowed_failure_is_still_one(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    if launch() == 1:
        os._exit(17)
    try:
        time.sleep(60)
    except BaseException as error:
        say("caught", type(error).__name__)
    """,
    )
    assert job.wait() == 17
    assert job.said("caught") == "RankFailed"
    assert job.last_line.endswith("failed first: exit code 17. All ranks have ended.")


def test_atexit_callbacks_before_and_after_launch_run(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    atexit.register(say, "before")
    rank = launch()
    atexit.register(say, "after")
    if rank == 1:
        os._exit(17)
    time.sleep(60)
    """,
    )
    assert job.wait() == 17
    assert (job.said("before"), job.said("after")) == ("yes", "yes")


@WAYS
def test_a_hook_of_the_users_sees_the_exception(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        text="""
    sys.excepthook = lambda kind, error, traceback: say("hook", f"{kind.__name__}: {error}")
    if launch() == 0:
        raise ValueError("boom")
    time.sleep(60)
    """,
    )
    assert job.wait() == 1
    assert job.said("hook") == "ValueError: boom"
    assert job.last_line.endswith("failed first: ValueError: boom (exit code 1). All ranks have ended.")


def test_a_hook_that_replaces_ours(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch()
    sys.excepthook = lambda kind, error, traceback: say("hook", f"{kind.__name__}: {error}")
    if rank == 0:
        raise ValueError("boom")
    time.sleep(60)
    """,
    )
    assert job.wait() == 1
    assert job.last_line.endswith("failed first: ValueError: boom (exit code 1). All ranks have ended.")


def test_the_first_record_counts(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch(3)
    if rank == 1:
        raise ValueError("first")
    if rank == 2:
        while not list(Path(LAUNCHED[0]._token.records).glob("1.json")):
            time.sleep(0.001)
        raise KeyError("second")
    time.sleep(60)
    """,
    )
    assert job.wait() == 1
    assert "rank 1 on host" in job.last_line
    assert "KeyError" not in job.stderr


def test_a_death_counts_before_the_error_that_it_causes(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch(3)
    if rank == 2:
        raise RuntimeError("Connection closed by peer")
    if rank == 1:
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    """,
    )
    assert job.wait() == 139
    assert job.last_line.endswith("failed first: SIGSEGV (signal 11). All ranks have ended.")


def test_what_a_failed_rank_started_ends_with_it(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    if launch() == 1:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """,
    )
    assert job.wait() == 137


@WAYS
def test_forked_children_do_not_keep_ranks_alive(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        text="""
    rank = launch()
    if os.fork() == 0:  # with the default handlers, and no copy of the death pipe's write end
        if rank == 0:
            say("handler", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            time.sleep(3)
        os._exit(0)
    say(f"rank-{rank}", os.getpid())
    time.sleep(60)
    """,
    )
    pids = [int(job.said("rank-0")), int(job.said("rank-1"))]
    assert job.said("handler") == "True"
    os.kill(job.pid, signal.SIGKILL)
    job.until(lambda: not set(pids) & set(job.living()), "the ranks to end")
    assert job.wait() == -9
    gone = f"rank 0 (pid {job.pid})" if way == "python" else f"fabric run (pid {job.pid})"
    assert f"fabric: {gone} is gone. Rank " in job.stderr


def test_ranks_end_with_their_launcher_before_they_launch(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    if "FABRIC_LAUNCH" in os.environ:
        say("child", os.getpid())
        time.sleep(60)
    launch()
    time.sleep(60)
    """,
    )
    job.said("child")
    os.kill(job.pid, signal.SIGKILL)
    started = time.monotonic()
    assert job.wait() == -9
    assert time.monotonic() - started < 2


@WAYS
def test_a_handler_of_the_users_may_save(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        text="""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    rank = launch()
    say(f"ready-{rank}")
    stop.wait()
    time.sleep(1.5)
    say(f"saved-{rank}")
    """,
    )
    job.said("ready-0"), job.said("ready-1")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 0
    assert (job.said("saved-0"), job.said("saved-1")) == ("yes", "yes")


@WAYS
def test_but_not_longer_than_the_grace_time(tmp_path: Path, way: str) -> None:
    job = begin(
        tmp_path,
        way=way,
        FABRIC_GRACE="0.5",
        text="""
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    rank = launch()
    say(f"ready-{rank}")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(1)
    """,
    )
    job.said("ready-0"), job.said("ready-1")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == (143 if way == "python" else 137)
    assert job.last_line.endswith("got SIGTERM (signal 15). All ranks have ended.")


def test_an_event_loop_may_take_the_wake_up_descriptor(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch()
    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        say(f"ready-{rank}")
        await asyncio.sleep(60)
    asyncio.run(main())
    """,
    )
    job.said("ready-0"), job.said("ready-1")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 143
    assert (
        job.last_line
        == f"fabric: rank 0 on host `{HOST}` (pid {job.pid}) got SIGTERM (signal 15). All ranks have ended."
    )


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch()
    try:
        say(f"ready-{rank}")
        time.sleep(60)
    except KeyboardInterrupt:
        say(f"caught-{rank}")
        time.sleep(60)
    """,
    )
    job.said("ready-0"), job.said("ready-1")
    job.send_to_group(signal.SIGINT)
    job.said("caught-0"), job.said("caught-1")
    job.send_to_group(signal.SIGINT)
    assert job.wait() == 130


def test_a_caught_interrupt_is_the_users(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    rank = launch()
    try:
        say(f"ready-{rank}")
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(3)
        say(f"caught-{rank}")
    """,
    )
    job.said("ready-0"), job.said("ready-1")
    job.send_to_group(signal.SIGINT)
    assert job.wait() == 0
    assert (job.said("caught-0"), job.said("caught-1")) == ("yes", "yes")


def test_a_processs_own_subprocess_is_no_rank(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    from fabric.processes.token import LaunchToken
    if len(sys.argv) > 1:
        say(f"subprocess-{sys.argv[1]}", LaunchToken.from_environ(os.environ, parent_pid=os.getppid()))
    else:
        rank = launch()
        subprocess.run([sys.executable, __file__, str(rank)], check=True)
    """,
    )
    assert job.wait() == 0
    assert (job.said("subprocess-0"), job.said("subprocess-1")) == ("None", "None")


def test_the_users_environment_and_hooks_stay(tmp_path: Path) -> None:
    job = begin(
        tmp_path,
        text="""
    def look():
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGURG)]
        return dict(os.environ), sys.excepthook, handlers
    before = look()
    rank = launch()
    environ, hook, handlers = look()
    assert environ == before[0]
    LAUNCHED[0].uninstall()
    assert look() == before
    assert signal.set_wakeup_fd(-1) == -1
    say(f"checked-{rank}")
    """,
    )
    assert job.wait() == 0
    assert (job.said("checked-0"), job.said("checked-1")) == ("yes", "yes")


def test_an_unreadable_grace_time(tmp_path: Path) -> None:
    job = begin(tmp_path, way="fabric run", FABRIC_GRACE="soon", text="")
    assert job.wait() == 2
    assert job.last_line == (
        "fabric run: error: `FABRIC_GRACE=soon` is not a number of seconds."
        " Give the time that a job has to end after a signal from outside: `FABRIC_GRACE=30`."
    )
