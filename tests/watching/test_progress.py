# SPDX-License-Identifier: Apache-2.0
import contextlib
import re
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.watching import ProgressBar
from fabric.watching.displays import Display
from tests.ranks import run_ranks


class _Clock:
    """Moves on by `step` seconds at each look."""

    def __init__(self, step=1.0):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


class _Recorder(Display):
    interval = 0.0

    def __init__(self):
        self.shown = []

    def open(self, state):
        self.shown.append(("open", state.line()))

    def draw(self, state):
        self.shown.append(("draw", state.line()))

    def close(self, state):
        self.shown.append(("close", state.line()))


def _bar(iterable, *, interval=0.0, clock=None, **options):
    display = _Recorder()
    display.interval = interval
    defaults = {"total": None, "description": "", "unit": "it", "samples": 0}
    return ProgressBar(iterable, display=display, clock=clock or _Clock(), **{**defaults, **options}), display.shown


def test_count_rate_samples_and_time_left() -> None:
    bar, shown = _bar(range(4), clock=_Clock(0.5), description="train", unit="batch", samples=32)
    assert list(bar) == [0, 1, 2, 3]
    assert len(bar) == 4
    assert shown == [
        ("open", "train:  0/4  0%"),
        ("draw", "train:  1/4  25%  2 batch/s  64 samples/s  0:02 left"),
        ("draw", "train:  2/4  50%  2 batch/s  64 samples/s  0:01 left"),
        ("draw", "train:  3/4  75%  2 batch/s  64 samples/s  0:00 left"),
        ("draw", "train:  4/4  100%  2 batch/s  64 samples/s"),
        ("close", "train:  4/4  100%  1.6 batch/s  51.2 samples/s"),
    ]


def test_slow_and_long() -> None:
    bar, shown = _bar(range(2), clock=_Clock(3725.0))
    items = iter(bar)
    next(items)
    bar.update()
    assert shown[1] == ("draw", "1/2  50%  3725 s/it  1:02:05 left")


def test_a_generator_has_no_length() -> None:
    bar, shown = _bar(x for x in "abc")
    assert "".join(bar) == "abc"
    assert shown[2] == ("draw", "2  1 it/s")
    with pytest.raises(TypeError, match=r"^This progress bar has no length. Pass `total=` to `fabric.progress`.$"):
        len(bar)
    bar, shown = _bar((x for x in "abc"), total=3)
    list(bar)
    assert shown[2] == ("draw", "2/3  66%  1 it/s  0:01 left")


def test_it_draws_after_the_interval_only_and_reads_tensors_only_then() -> None:
    read = []

    class Counted(torch.Tensor):
        def item(self):
            read.append(float(self.sum()))
            return read[-1]

    bar, shown = _bar(range(10), interval=4.0)
    for i in bar:
        bar.show(loss=torch.tensor(i / 2).as_subclass(Counted), lr=0.123456, phase="warm")
    assert [re.split("it/s|s/it", line)[-1].strip() for _, line in shown[1:]] == [
        "0:06 left  loss 1.5  lr 0.1235  phase warm",
        "0:02 left  loss 3.5  lr 0.1235  phase warm",
        "loss 4.5  lr 0.1235  phase warm",
    ]
    assert read == [1.5, 3.5, 4.5]


def test_the_graph_of_what_is_shown_is_let_go() -> None:
    bar, _ = _bar(range(2), interval=100.0)
    for _ in bar:
        loss = torch.ones(1, requires_grad=True) * 2
        bar.show(loss=loss)
        node = weakref.ref(loss)
        del loss
        assert node() is None


def test_a_batch_lives_as_long_as_the_loop_wants() -> None:
    class Batch:
        pass

    bar, _ = _bar(Batch() for _ in range(2))
    for batch in bar:
        held = weakref.ref(batch)
        del batch
        assert held() is None


def test_leaving_early_closes_the_bar_and_reads_no_tensor() -> None:
    class Broken(torch.Tensor):
        def item(self):
            raise AssertionError("a GPU that has failed")

    def leave(bar, error):
        for i in bar:
            bar.show(loss=torch.tensor(0.5).as_subclass(Broken))
            if i == 2 and error is not None:
                raise error
            if i == 2:
                break

    for error in (None, ValueError("mine")):
        bar, shown = _bar(range(5), interval=100.0)
        with pytest.raises(ValueError, match=r"^mine$") if error else contextlib.nullcontext():
            leave(bar, error)
        assert shown == [("open", "0/5  0%"), ("close", "2/5  40%  1.5 s/it  0:04 left")]
        assert list(bar)[:2] == [0, 1]  # and it can be gone through again
        assert shown[2] == ("open", "0/5  0%")


def test_an_error_of_the_iterable_comes_through() -> None:
    def items():
        yield 1
        raise ValueError("mine")

    bar, shown = _bar(items())
    with pytest.raises(ValueError, match=r"^mine$"):
        list(bar)
    assert [what for what, _ in shown] == ["open", "draw", "close"]


def test_moved_by_hand() -> None:
    bar, shown = _bar(None, total=10, unit="file")
    with bar:
        bar.update(4)
        bar.update()
    assert [line for _, line in shown] == [
        "0/10  0%",
        "4/10  40%  4 file/s  0:02 left",
        "5/10  50%  2.5 file/s  0:02 left",
        "5/10  50%  1.67 file/s  0:03 left",
    ]
    message = "`update()` moves a bar that is open. Write `with fabric.progress(total=...) as bar:`."
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        bar.update()
    message = "`fabric.progress()` has nothing to go through. Pass an iterable, or move it by `update`."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        iter(bar)


def test_going_through_it_in_a_with_block() -> None:
    bar, shown = _bar(range(2))
    with bar:
        for i in bar:
            bar.show(i=i)
    assert shown[-1] == ("close", "2/2  100%  1.5 s/it  i 1")
    assert [what for what, _ in shown].count("close") == 1


def test_going_through_it_twice_at_once_is_shown_once() -> None:
    bar, shown = _bar([1, 2])
    assert list(zip(bar, bar, strict=True)) == [(1, 1), (2, 2)]
    assert [what for what, _ in shown].count("open") == 1


def test_what_is_shown_is_one_number() -> None:
    bar, _ = _bar([1])
    message = (
        "`show(loss=...)` needs one number, but got a tensor of shape (2,)."
        " Reduce it first, for example with `.mean()`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bar.show(loss=torch.ones(2))


def test_lines_where_there_is_no_terminal(capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(10.0), batch_size=4))
    bar = fabric.progress(loader, description="epoch 0", unit="batch")
    assert len(bar) == 3
    for batch in bar:
        bar.show(loss=batch.sum())
    out, err = capsys.readouterr()
    first, *_, last = err.splitlines()
    assert out == ""
    assert first == "epoch 0:  0/3  0%"
    assert re.fullmatch(r"epoch 0:  3/3  100%  \S+ batch/s  \S+ samples/s  loss 17", last)


def test_a_resumed_loader_starts_at_its_place(capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(10.0), batch_size=2))
    for index, _ in enumerate(fabric.progress(loader)):
        if index == 2:
            break
    state = loader.state_dict()
    capsys.readouterr()
    list(fabric.progress(loader))  # the next epoch, from its start
    assert capsys.readouterr().err.splitlines()[0] == "0/5  0%"
    loader.load_state_dict(state)
    assert [int(batch[0]) for batch in fabric.progress(loader)] == [6, 8]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "3/5  60%"
    assert lines[-1].startswith("5/5  100%  ")


def test_windows_of_a_resumed_loader_start_at_its_place(capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(10.0), batch_size=2))
    loader.load_state_dict({**loader.state_dict(), "position": 2, "consumed": 4})
    windows = fabric.progress(fabric.accumulate(loader, 2))
    assert [[int(batch[0]) for batch in window] for window in windows] == [[4, 6], [8]]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1/3  33%"
    assert lines[-1].startswith("3/3  100%  ")


def test_set_up_loaders_of_any_kind(capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    loader = fabric.setup_dataloaders([torch.ones(2), torch.ones(2)])
    assert len(list(fabric.progress(loader))) == 2
    assert capsys.readouterr().err.splitlines()[0] == "0/2  0%"


def test_wrong_display() -> None:
    message = "`fabric.progress(display='rihc')` is not known. Choose one of auto, rich, tqdm, lines."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Fabric(accelerator="cpu").progress([1], display="rihc")


class _Stream(torch.utils.data.IterableDataset):
    """A stream whose state the loader gathers from all ranks."""

    def __init__(self):
        self.seen = 0

    def __iter__(self):
        for self.seen in range(8):
            yield self.seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def _on_rank(context):
    import io

    fabric = context.fabric()
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2))
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        bar = fabric.progress(loader)
        for batch in bar:
            bar.show(loss=batch.sum())
            bar.update(0)
        with fabric.progress(total=2) as by_hand:
            by_hand.update(2)
    try:
        bar.show(loss=torch.ones(2))
    except ValueError as error:
        raised = str(error)
    stream = fabric.setup_dataloaders(DataLoader(_Stream(), batch_size=2))
    seen = sum(len(batch) for batch in fabric.progress(stream, display="lines"))  # asks no other rank where it is
    assert seen == 4
    return len(bar), type(bar).__name__, bar._state.samples, raised, written.getvalue().splitlines()


@pytest.mark.ranks
def test_only_rank_zero_shows() -> None:
    first, second = run_ranks(2, _on_rank)
    assert first[:-1] == second[:-1]
    assert first[:3] == (2, "ProgressBar", 4)
    assert [line[:3] for line in first[-1]] == ["0/2", "2/2", "0/2", "2/2"]
    assert second[-1] == []
