# SPDX-License-Identifier: Apache-2.0
"""Weights as `safetensors`: Hugging Face's form, under each strategy, beside the rest, never half."""

import json
import os
import pickle
import random
import re
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from fabric.checkpoint import load, load_raw, save
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import WORLD, Net, full_state, make, optimizer_for, plain, same, train
from tests.checkpoint.test_stages import ONLY, Stages, Whole
from tests.checkpoint.test_stages import optimizer_for as stage_optimizer
from tests.checkpoint.test_stages import state_of as stage_state
from tests.checkpoint.test_stages import train as train_stage
from tests.ranks import RankContext, run_ranks

pytest.importorskip("safetensors")

STEPS = 2
TOLERANCE = 1e-6  # sums in another order
WITH: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}
SMALL = 300  # bytes: four files


def saved(path: Any, **options: Any) -> dict[str, Any]:
    net, optimizer = plain("adam", STEPS)
    save(path, {"net": net, "optimizer": optimizer, "step": STEPS}, **{"format": "safetensors", **WITH, **options})
    return {**full_state(net, optimizer), "step": STEPS}


def loaded(path: Any) -> dict[str, Any]:
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "step": 0}
    assert load(path, state, **WITH) == {}
    return {**full_state(net, optimizer), "step": state["step"]}


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


# under each strategy


def _save(context: RankContext, path: str, layout: str, size: Any) -> None:
    fabric, net, optimizer = make(context, layout, "adam", seed=1)
    for step in range(STEPS):
        train(net, optimizer, step)
    fabric.save(path, {"net": net, "optimizer": optimizer, "step": STEPS}, format="safetensors", max_shard_size=size)


def _load(context: RankContext, path: str, layout: str) -> Any:
    fabric, net, optimizer = make(context, layout, "adam", seed=2)
    state = {"net": net, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == STEPS
    both = full_state(net.module, optimizer.optimizer)
    train(net, optimizer, STEPS)
    after = full_state(net.module, optimizer.optimizer)
    fabric.load(path, {"net": net})
    return both, after, full_state(net.module, torch.optim.SGD([next(iter(net.parameters()))]))


@pytest.mark.ranks
@pytest.mark.parametrize(("saved_by", "size"), [("ours2", SMALL), ("hsdp", "0.3kB")])
def test_what_one_strategy_saved_all_others_load(saved_by: str, size: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(WORLD[saved_by], _save, path, saved_by, size)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 4
    for layout in ("single", "ours4", "tp"):
        before, after = full_state(*plain("adam", STEPS)), full_state(*plain("adam", STEPS + 1))
        for both, trained, weights in run_ranks(WORLD[layout], _load, path, layout):
            assert same(both, before, TOLERANCE)
            assert same(trained, after, TOLERANCE)
            assert same({n: v for n, v in weights.items() if n in before and " of " not in n}, plain_weights(), 1e-6)


def plain_weights() -> dict[str, Any]:
    return dict(plain("adam", STEPS)[0].state_dict())


def _save_stages(context: RankContext, path: str) -> None:
    fabric = context.fabric(strategy=Stages("full"))
    net = Whole(1, ONLY[fabric.global_rank])
    net_, optimizer = fabric.setup(net, stage_optimizer(net))
    train_stage(net, optimizer.optimizer)
    fabric.save(path, {"net": net_, "optimizer": optimizer}, format="safetensors")


@pytest.mark.ranks
def test_ranks_with_different_parameters(tmp_path: Path) -> None:
    run_ranks(2, _save_stages, str(tmp_path / "a"))
    net = Whole(2)
    optimizer = stage_optimizer(net)
    load(tmp_path / "a", {"net": net, "optimizer": optimizer}, **WITH)
    expected = Whole(1)
    other = stage_optimizer(expected)
    train_stage(expected, other)
    assert same(stage_state(net, optimizer), stage_state(expected, other))


def _fails(context: RankContext, path: str) -> Any:
    fabric, net, optimizer = make(context, "fsdp2", "adam", seed=1)
    train(net, optimizer, 0)
    state = {"net": net, "optimizer": optimizer}
    fabric.save(path, state, format="safetensors")
    before = sorted(os.listdir(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        fabric.save(path, state, format="safetensors", max_shard_size=SMALL)
    except OSError as error:
        return type(error).__name__, str(error), before == sorted(os.listdir(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error"


@pytest.mark.ranks
def test_a_write_that_fails_raises_everywhere_and_leaves_the_old_one(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    error = ("OSError", f"[Errno 27] File too large: '{path}'", True)
    assert run_ranks(2, _fails, path) == [error, error]
    load(path, {"net": Net(2)}, **WITH)


def _peak(context: RankContext, path: str, size: int, count: int) -> int:
    """Bytes of memory that a save takes beyond what the process has."""
    fabric = context.fabric(strategy="fsdp")
    net = fabric.setup(nn.Sequential(*(nn.Linear(size // 4096, 1024, bias=False) for _ in range(count))))
    fabric.save(f"{path}-first", {"net": net}, format="safetensors")  # what is imported and allocated once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _kilobytes("VmRSS")
    fabric.save(path, {"net": net}, format="safetensors", max_shard_size=3 * size)
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux says how much memory a process had")
def test_no_rank_holds_the_whole_model_to_save_it(tmp_path: Path) -> None:
    size, count = 8 << 20, 16
    peaks = run_ranks(2, _peak, str(tmp_path / "a"), size, count)
    assert max(peaks) < count * size / 2
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) > size * count


# the files


def test_a_folder_is_as_hugging_face_writes_it(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    saved(tmp_path / "ours", max_shard_size=SMALL)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    state = plain("adam", STEPS)[0].state_dict()
    assert index["weight_map"].keys() == state.keys() - {"head.weight"}
    assert index["metadata"]["total_size"] == sum(v.nbytes for n, v in state.items() if n != "head.weight")
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)}
    net = Net(seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hub.load_torch_model(net, tmp_path / "ours", strict=False)
    assert same(net.state_dict(), state)


@pytest.mark.parametrize("size", ["5GB", SMALL])
@pytest.mark.parametrize("safe", [True, False])
def test_weights_by_hugging_face(size: Any, safe: bool, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    net, _ = plain("adam", STEPS)
    hub.save_torch_model(net, tmp_path, max_shard_size=size, safe_serialization=safe)
    names = sorted(os.listdir(tmp_path))
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    assert (f"{stem}.index.json" in names) == (size == SMALL)
    for path in (tmp_path, *([tmp_path / f"{stem}.index.json"] if safe and size == SMALL else [])):
        one, two = Net(2), Net(3)
        load_raw(path, one, **WITH)
        load(path, {"net": two}, **WITH)
        assert same(one.state_dict(), net.state_dict())
        assert same(two.state_dict(), net.state_dict())


def test_weights_by_the_package_and_by_pytorch(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    net, _ = plain("adam", STEPS)
    save_model(net, str(tmp_path / "a.safetensors"))
    torch.save(net.state_dict(), tmp_path / "b.pt")
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, tmp_path / "c.ckpt")
    for name in ("a.safetensors", "b.pt", "c.ckpt"):
        other = Net(2)
        load_raw(tmp_path / name, other, **WITH)
        assert same(other.state_dict(), net.state_dict())
    saved(tmp_path / "d.safetensors", format=None)
    other = Net(2)
    load_model(other, str(tmp_path / "d.safetensors"))
    assert same(other.state_dict(), net.state_dict())


def test_weights_by_lightning_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # it sets that
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.fabric")
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        net, optimizer = plain("adam", STEPS)
        fabric.save(tmp_path / "a.ckpt", {"net": net, "optimizer": optimizer, "step": STEPS})
    other = Net(2)
    load_raw(tmp_path / "a.ckpt", other, **WITH)
    assert same(other.state_dict(), net.state_dict())
    assert loaded(tmp_path / "a.ckpt")["step"] == STEPS


def _save_as_lightning(context: RankContext, path: str) -> None:
    """What its sharded strategies call: PyTorch's own functions for the objects, and the rest in `meta.pt`."""
    from torch.distributed.checkpoint import save as save_distributed
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    context.process_group()
    net = small_net(1)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"net": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    save_distributed(state, checkpoint_id=path)
    if context.rank == 0:
        torch.save({"step": STEPS}, f"{path}/meta.pt")


def small_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.ranks
def test_a_folder_of_lightning_fabric(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _save_as_lightning, path)
    expected = small_net(1)
    expected_optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    expected(torch.ones(1, 3)).sum().backward()
    expected_optimizer.step()
    one, two = small_net(2), small_net(3)
    optimizer = torch.optim.Adam(two.parameters(), lr=0.2)
    load_raw(path, one, **WITH)
    load(path, {"net": two, "optimizer": optimizer}, **WITH)
    assert same(one.state_dict(), expected.state_dict(), TOLERANCE)
    assert same(full_state(two, optimizer), full_state(expected, expected_optimizer), TOLERANCE)


def test_a_file_by_its_ending(tmp_path: Path) -> None:
    expected = saved(tmp_path / "x.safetensors", format=None)
    assert same(loaded(tmp_path / "x.safetensors"), expected)
    saved(tmp_path / "x.safetensors", format=None)
    assert [n.split(".")[:2] for n in sorted(os.listdir(tmp_path))] == [
        ["x", "safetensors"],
        ["x", _training(tmp_path)],
    ]


def _training(folder: Path) -> str:
    (path,) = folder.glob("x.training-*.pt")
    return path.name.split(".")[1]


def test_several_modules_and_what_is_no_tensor(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        note = 0

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    first, second = Extra(2, 3), nn.BatchNorm1d(3)
    first.note = 5
    save(tmp_path / "a", {"nets": [first, second], "tag": (1, "x")}, format="safetensors", **WITH)
    one, two = Extra(2, 3), nn.BatchNorm1d(3)
    state: dict[str, Any] = {"nets": [one, two], "tag": None}
    load(tmp_path / "a", state, **WITH)
    assert same(one.state_dict(), first.state_dict())
    assert same(two.state_dict(), second.state_dict())
    assert one.note == 5
    assert state["tag"] == (1, "x")
    from safetensors.torch import load_file

    assert "nets.0.weight" in load_file(tmp_path / "a" / "model.safetensors")


def test_a_folder_without_the_rest_gives_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (rest,) = (tmp_path / "a").glob("*.pt")
    rest.unlink()
    error = (
        f"`{tmp_path / 'a'}` does not match what is to be restored. Nothing was changed.\n"
        '  missing     state["optimizer"]\n  missing     state["step"]\n'
        "To skip what is missing or unexpected, pass `strict=False`."
    )
    with pytest.raises(RuntimeError, match=texts(error)):
        loaded(tmp_path / "a")
    other = Net(2)
    load(tmp_path / "a", {"net": other}, **WITH)
    assert same(other.state_dict(), plain_weights())


# never half


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("url", ["", "memory://half/"])
@pytest.mark.parametrize(("first", "second"), [(None, None), (None, SMALL), (SMALL, None), (SMALL, SMALL)])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one(
    first: Any, second: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabric.checkpoint.weights import places, saving

    left = 0

    def step(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Killed
            return function(*args, **kwargs)

        return counted

    outcomes = set()
    for count in range(40):
        place = f"{url or f'{tmp_path}/'}{count}"
        expected = saved(place, max_shard_size=first)
        net, optimizer = plain("adam", STEPS + 1)
        state = {"net": net, "optimizer": optimizer, "step": STEPS + 1}
        left = count
        with monkeypatch.context() as patch:
            for module, name in [
                (saving, "write_safetensors"),
                (saving, "write_torch_file"),
                (saving, "remove_others"),
                (places, "remove_file"),
            ]:
                patch.setattr(module, name, step(getattr(module, name)))
            patch.setattr(saving, "remove_file", lambda path: None)  # a killed process removes nothing
            try:
                save(place, state, format="safetensors", max_shard_size=second, **WITH)
                break
            except _Killed:
                pass
        now = loaded(place)
        outcomes.add(now["step"])
        assert same(now, expected if now["step"] == STEPS else {**full_state(net, optimizer), "step": STEPS + 1})
        saved(place, max_shard_size=second)
        assert same(loaded(place), expected)
        kept = fsspec.core.url_to_fs(place)[0].find(place)
        assert len(kept) == (2 if second is None else 6)
    assert outcomes == {STEPS, STEPS + 1}


@pytest.mark.parametrize("size", [None, SMALL])
def test_an_interruption_after_the_last_step_leaves_the_new_one(
    size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(tmp_path / "a", max_shard_size=size)
    net, optimizer = plain("adam", STEPS)
    replace = os.replace

    def interrupted(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(("model.safetensors", ".json")):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    state = {"net": net, "optimizer": optimizer, "step": STEPS + 1}
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a", state, format="safetensors", max_shard_size=size, **WITH)
    assert same(loaded(tmp_path / "a"), {**expected, "step": STEPS + 1})


def test_layouts_take_each_others_place(tmp_path: Path) -> None:
    path = tmp_path / "a"
    names = {"safetensors": "model.safetensors", "sharded": ".metadata"}
    for format in ("safetensors", "sharded", "safetensors", "torch", "safetensors", "torch", "sharded", "torch"):
        expected = saved(path, format=format)
        assert same(loaded(path), expected)
        assert path.is_file() if format == "torch" else names[format] in os.listdir(path)
        assert path.is_file() or len(os.listdir(path)) == 2
    assert os.listdir(tmp_path) == ["a"]


def test_a_single_number_between_others(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    net.bias = nn.Parameter(torch.arange(4.0)[1::2][:1])
    assert net.bias.stride() == (2,)
    save(tmp_path / "a", {"net": net}, format="safetensors", **WITH)
    assert torch.equal(load(tmp_path / "a", **WITH)["net"]["bias"], torch.ones(1))


def test_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.notes.txt").write_text("")
    saved(tmp_path, max_shard_size=SMALL)
    saved(tmp_path)
    names = sorted(os.listdir(tmp_path))
    assert names[:3] == ["config.json", "model.notes.txt", "model.safetensors"]
    assert len(names) == 4


def test_one_file_leaves_all_others_alone(tmp_path: Path) -> None:
    expected = saved(tmp_path, format="sharded")
    other = {"max_shard_size": SMALL}
    saved(tmp_path / "hub", **other)
    before = {*os.listdir(tmp_path), *os.listdir(tmp_path / "hub")}
    for _ in range(2):
        saved(tmp_path / "model.safetensors", format=None)
        saved(tmp_path / "hub" / "model.safetensors", format=None)
    assert before <= {*os.listdir(tmp_path), *os.listdir(tmp_path / "hub")}
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "hub" / "model.safetensors.index.json"):
        net = Net(2)
        load(path, {"net": net}, **WITH)
        assert same(net.state_dict(), plain_weights())
    assert same(loaded(tmp_path), expected)


# errors


def _error(call: Any) -> str:
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        call()
    return str(caught.value)


def test_errors_of_save(tmp_path: Path) -> None:
    class Own(CheckpointIO):
        save_checkpoint = load_checkpoint = remove_checkpoint = None  # type: ignore[assignment]

    path = tmp_path / "a"
    assert _error(lambda: saved(path, format="safetensor")) == (
        "`fabric.save(..., format='safetensor')` is not a known format. Did you mean 'safetensors'?"
        " Choose one of 'torch', 'sharded', 'safetensors'."
    )
    assert _error(lambda: saved(path, format=None, max_shard_size="5GB")) == (
        "`fabric.save(..., max_shard_size='5GB')` is for `format='safetensors'`. Leave it out, or write that too."
    )
    assert _error(lambda: saved(path, max_shard_size="many")) == (
        "`max_shard_size='many'` is no size. Write a number of bytes, or one as in `'5GB'`."
    )
    assert _error(lambda: saved("x.safetensors", max_shard_size=5)) == (
        "`fabric.save('x.safetensors', ..., max_shard_size=5)`: this is one file. Give a folder with"
        " `format='safetensors'` for several."
    )
    assert _error(lambda: save(path, {"step": 1}, format="safetensors", **WITH)) == (
        "`fabric.save(..., format='safetensors')`: `state` holds no module whose weights could be written. Write"
        " `{'model': model, ...}`, or leave `format` out."
    )
    net = nn.Linear(1, 1, dtype=torch.complex128)
    assert _error(lambda: save(path, {"net": net}, format="safetensors", **WITH)) == (
        "`fabric.save(..., format='safetensors')`: `weight` is a `Tensor` of complex128 (strided), which safetensors"
        " has no form for. Leave out `format`, or the tensor with `filter`."
    )
    assert not path.exists()


def _damage(path: Path, how: str) -> str:
    """Damages a folder of four files; returns the file that the error must name."""
    index = path / "model.safetensors.index.json"
    shard = path / "model-00002-of-00004.safetensors"
    content = json.loads(index.read_text())
    if how == "missing":
        shard.unlink()
    elif how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-5])
        return shard.name
    elif how == "header":
        shard.write_bytes(shard.read_bytes()[:30])
        return shard.name
    elif how == "outside":
        content["weight_map"]["up.bias"] = "../up.safetensors"
        index.write_text(json.dumps(content))
    elif how == "elsewhere":
        content["weight_map"]["up.bias"] = shard.name
        content["weight_map"]["unused.bias"] = shard.name
        index.write_text(json.dumps(content))
        return shard.name
    else:
        index.write_text(how)
    return index.name


@pytest.mark.parametrize(
    "how", ["missing", "truncated", "header", "outside", "elsewhere", "", "[]", "{}", '{"weight_map": {"a": 1}}']
)
def test_damaged_folders_are_refused_by_name(how: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", max_shard_size=SMALL)
    name = _damage(tmp_path / "a", how)
    net = Net(2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=rf"^`{re.escape(str(tmp_path / 'a' / name))}` can't be read as a checkpoint"):
        load(tmp_path / "a", {"net": net}, **WITH)
    assert same(before, net.state_dict())


def _broken(data: bytes, chance: random.Random) -> bytes | None:
    """A file with some bits flipped at its beginning, cut, replaced by another one, or gone."""
    how = chance.choice(["flip", "cut", "foreign", "gone"])
    if how == "cut":
        return data[: chance.randrange(len(data))]
    if how == "foreign":
        return chance.choice([b"", b"hello", b"[]", b"{}", b"\2\0\0\0\0\0\0\0{}", b"\xff" * 20])
    if how == "gone":
        return None
    flipped = bytearray(data)
    for _ in range(3):
        flipped[chance.randrange(min(len(data), 900))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch's, about pickles that make no sense
@pytest.mark.parametrize("size", [None, SMALL])
def test_whatever_is_broken_is_named_and_nothing_is_changed(size: Any, tmp_path: Path) -> None:
    saved(tmp_path / "a", max_shard_size=size)
    chance = random.Random(7)
    refused = []
    for number in range(60):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "a", folder)
        path = chance.choice(sorted(folder.iterdir()))
        data = _broken(path.read_bytes(), chance)
        path.unlink() if data is None else path.write_bytes(data)
        net = Net(2)
        optimizer = optimizer_for(net, "adam")
        before = full_state(net, optimizer)
        try:
            load(folder, {"net": net, "optimizer": optimizer, "step": 0}, **WITH)
        except (ValueError, RuntimeError, OSError, pickle.UnpicklingError) as error:
            refused.append((str(folder) in str(error), same(full_state(net, optimizer), before)))
    assert set(refused) == {(True, True)}
    assert len(refused) > 30


def test_shards_without_an_index_are_not_complete(tmp_path: Path) -> None:
    saved(tmp_path / "a", max_shard_size=SMALL)
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    error = (
        f"`{tmp_path / 'a'}` is a folder without `.metadata`, so no checkpoint was completed there: it is written"
        " last. Load another checkpoint."
    )
    with pytest.raises(ValueError, match=texts(error)):
        loaded(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(
        FileNotFoundError, match=texts(f"[Errno 2] No such file or directory: '{tmp_path}/b.safetensors'")
    ):
        loaded(tmp_path / "b.safetensors")


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_rare_numbers(dtype: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = torch.tensor([0.5, 1.0, 4.0]).to(getattr(torch, dtype))
    save_file({"w": values}, tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors", **WITH)["w"]
    assert loaded.dtype == values.dtype
    assert torch.equal(loaded.float(), values.float())
