# SPDX-License-Identifier: Apache-2.0
"""Folders: PyTorch's own format, never half, and nothing in them runs."""

import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from fabric.checkpoint import load, load_raw, save
from fabric.checkpoint.files import swap
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import Net, full_state, make, optimizer_for, plain, same, train
from tests.ranks import RankContext, run_ranks


class Folders(SingleDeviceStrategy):
    """One process that writes folders."""

    state_dict_type = "sharded"


WITH: dict[str, Any] = {"access": Folders(), "io": TorchCheckpointIO()}
FILES: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}


def saved(path: Any, kind: str = "adam", steps: int = 2, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, optimizer = plain(kind, steps)
    save(path, {"net": net, "optimizer": optimizer, "step": steps, **more}, **WITH)
    return net, optimizer


def loaded(path: Any, kind: str = "adam", **options: Any) -> dict[str, Any]:
    net = Net(seed=2)
    optimizer = optimizer_for(net, kind)
    state = {"net": net, "optimizer": optimizer, "step": 0}
    load(path, state, **WITH, **options)
    return {**full_state(net, optimizer), "step": state["step"]}


def expected(kind: str = "adam", steps: int = 2) -> dict[str, Any]:
    return {**full_state(*plain(kind, steps)), "step": steps}


def data_folder(path: Path) -> Path:
    (folder,) = path.glob("data-*")
    return folder


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


# what is in it


def test_the_keys_are_the_plain_models(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    saved(tmp_path / "a", kind="momentum")
    keys = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata.keys()
    assert keys >= {"net.up.weight", "optimizer.state.up.weight.momentum_buffer", "optimizer.param_groups.1.lr", "step"}
    assert "optimizer.state.unused.weight.momentum_buffer" not in keys
    assert sorted(os.listdir(tmp_path / "a")) == [".metadata", data_folder(tmp_path / "a").name]


def test_pytorch_converts_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    net, optimizer = saved(tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt")
    assert same(content["net"], net.state_dict())
    assert content["step"] == 2
    assert torch.equal(content["optimizer"]["state"]["up.weight"]["exp_avg"], optimizer.state[net.up.weight]["exp_avg"])
    # What it makes of a folder is loaded too, whose optimizer state is by names.
    assert same(loaded(tmp_path / "a.pt"), expected())


def test_pytorchs_own_functions_load_it_and_are_loaded(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    saved(tmp_path / "a")
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    train(net, optimizer, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.load({"net": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "a", no_dist=True)
        assert same(dict(model_state), dict(plain("adam", 2)[0].state_dict()))
        options = StateDictOptions(strict=False)  # not each parameter has a state
        set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
        assert same(full_state(net, optimizer), full_state(*plain("adam", 2)))
        content = {"net": model_state, "optimizer": optimizer_state, "step": 2}
        dcp.save(content, checkpoint_id=tmp_path / "b", no_dist=True)
    assert same(loaded(tmp_path / "b"), expected())


def test_everything_comes_back_in_place_and_a_fresh_optimizer_takes_no_step(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    weight = net.up.weight
    load(tmp_path / "a", {"net": net, "optimizer": optimizer}, **WITH)
    assert net.up.weight is weight
    assert net.head.weight is net.embedding.weight
    assert steps == []
    assert same(full_state(net, optimizer), full_state(*plain("adam", 2)))
    assert net.unused.weight not in optimizer.state
    assert optimizer.state[weight]["step"].shape == ()


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_files_and_folders_are_told_apart_by_themselves(kind: str, tmp_path: Path) -> None:
    net, optimizer = saved(tmp_path / "a", kind)
    save(tmp_path / "a.pt", {"net": net, "optimizer": optimizer, "step": 2}, **FILES)
    for path in (tmp_path / "a", tmp_path / "a.pt"):
        assert same(loaded(path, kind), expected(kind))


def test_a_url(tmp_path: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    try:
        saved("memory://runs/a", steps=1)
        saved("memory://runs/a", steps=2)
        assert same(loaded("memory://runs/a"), expected())
        assert len(filesystem.ls("/runs/a")) == 2
        filesystem.rm("/runs/a/.metadata")
        with pytest.raises(ValueError, match=r"is a folder without `\.metadata`"):
            loaded("memory://runs/a")
    finally:
        filesystem.rm("/runs", recursive=True)


def test_modules_with_loaders_of_their_own(tmp_path: Path) -> None:
    class Renames(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old") * 2
            super()._load_from_state_dict(state_dict, prefix, *args)

    old = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    old["a"].old = old["a"].weight
    del old["a"].weight
    new = nn.ModuleDict({"a": Renames(2, 2, bias=False), "b": nn.Linear(2, 2)})
    save(tmp_path / "a", {"net": old}, **WITH)
    load(tmp_path / "a", {"net": new}, **WITH)
    assert torch.equal(new["a"].weight, old["a"].old * 2)
    assert torch.equal(new["b"].weight, old["b"].weight)


def test_two_values_under_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two values would have the key `net\.weight` in the folder"):
        save(tmp_path / "a", {"net": nn.Linear(1, 1), "net.weight": 1}, **WITH)
    assert os.listdir(tmp_path) == []


def test_groups_that_became_one_keep_their_options_where_they_can_not_tell(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    net = Net(seed=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.3)
    text = (
        f"`{tmp_path}/a` does not match what is to be restored. Nothing was changed.\n"
        '  mismatched  state["optimizer"]: unlike values of lr, weight_decay in the file,'
        " the same parameters in one group of the optimizer"
    )
    with pytest.raises(RuntimeError, match=texts(text)):
        load(tmp_path / "a", {"net": net, "optimizer": optimizer}, **WITH)
    load(tmp_path / "a", {"net": net, "optimizer": optimizer}, strict=False, **WITH)
    assert optimizer.param_groups[0]["lr"] == 0.3
    state = full_state(*plain("adam", 2))
    assert torch.equal(optimizer.state[net.up.bias]["exp_avg"], state["exp_avg of up.bias"])


# never half


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    saved(tmp_path / "a", steps=1)
    first = data_folder(tmp_path / "a")
    saved(tmp_path / "a", steps=2)
    assert not first.exists()
    assert same(loaded(tmp_path / "a"), expected())
    assert len(os.listdir(tmp_path / "a")) == 2


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_takes_the_place_of_a_file_and_back(
    in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_one_step:  # as on a file system that can't do that
        monkeypatch.setattr(swap, "_exchange", lambda new, target: False)
    net, optimizer = plain("adam", 1)
    save(tmp_path / "a", {"net": net}, **FILES)
    saved(tmp_path / "a", steps=2)
    assert os.listdir(tmp_path) == ["a"]
    assert same(loaded(tmp_path / "a"), expected())
    net, optimizer = plain("adam", 3)
    save(tmp_path / "a", {"net": net, "optimizer": optimizer, "step": 3}, **FILES)
    assert os.listdir(tmp_path) == ["a"]
    assert same(loaded(tmp_path / "a"), expected(steps=3))


def test_what_killed_saves_left_is_not_a_checkpoint_and_goes_with_the_next_one(tmp_path: Path) -> None:
    saved(tmp_path / "a", steps=1)
    (tmp_path / "a" / ".metadata").rename(tmp_path / "kept")  # as a kill before the last step leaves a new folder
    text = (
        f"`{tmp_path}/a` is a folder without `.metadata`, so no checkpoint was completed there: it is written last."
        " Load another checkpoint."
    )
    with pytest.raises(ValueError, match=texts(text)):
        loaded(tmp_path / "a")
    (tmp_path / "a" / "data-0123abcd").mkdir()
    (tmp_path / "a" / "__0_0.distcp").touch()
    (tmp_path / "a" / "notes.txt").touch()
    saved(tmp_path / "a", steps=2)
    assert same(loaded(tmp_path / "a"), expected())
    assert sorted(os.listdir(tmp_path / "a")) == [".metadata", data_folder(tmp_path / "a").name, "notes.txt"]


def _save_through(context: RankContext, path: str) -> tuple[str, str]:
    fabric, net, _ = make(context, "fsdp2", "adam", seed=1, type="sharded")
    fabric.save(path, {"net": net})
    before = sorted(os.listdir(path))
    try:
        fabric.save(f"{path}/.metadata/x", {"net": net})
    except OSError as error:
        assert sorted(os.listdir(path)) == before
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.ranks
def test_a_path_through_a_file_is_seen_by_all_and_leaves_nothing(tmp_path: Path) -> None:
    errors = run_ranks(2, _save_through, str(tmp_path / "a"))
    assert errors[0] == errors[1]
    assert errors[0][0] == "NotADirectoryError"
    assert f"{tmp_path}/a/.metadata/x" in errors[0][1]


def _save_limited(context: RankContext, path: str, failing: int) -> tuple[str, str]:
    """One rank may write 2 KB at most, as on a full disk."""
    import resource
    import signal

    fabric, net, _ = make(context, "fsdp2", "adam", seed=1, type="sharded")
    fabric.save(path, {"net": net, "step": 1})
    nn.init.zeros_(net.module.up.weight)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if fabric.global_rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            fabric.save(f"{path}-new", {"net": net, "step": 2})
        fabric.save(path, {"net": net, "step": 2})
    except OSError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return "", ""


@pytest.mark.ranks
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_can_not_write_is_seen_by_all_and_the_old_one_stays(failing: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    text = f"[Errno 27] File too large: '{path}'"
    assert run_ranks(2, _save_limited, str(path), failing) == [("OSError", text)] * 2
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(path)) == [".metadata", data_folder(path).name]
    net, state = Net(seed=2), {"step": 0}
    load(path, {"net": net, **state}, **WITH)
    assert same(net.state_dict(), Net(seed=1).state_dict())


# nothing in it runs


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_payload_in_the_metadata_is_named_and_does_not_run(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Payload()))
    text = (
        f"The `.metadata` of `{tmp_path}/a` asks for `posix.system`, which is not part of a checkpoint's metadata and"
        " is not loaded, since unpickling it can run code. If you trust the folder, pass `weights_only=False`."
    )
    with pytest.raises(pickle.UnpicklingError, match=texts(text)):
        loaded(tmp_path / "a")
    assert not Path("ran").exists()


def test_members_of_enumerations_can_not_be_used_to_reach_anything_else(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    reach = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR."
    (tmp_path / "a" / ".metadata").write_bytes(reach)
    with pytest.raises(pickle.UnpicklingError, match="asks for `getattr"):
        loaded(tmp_path / "a")


def test_a_pickled_object_is_named_with_its_key(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"args": {"a": [1, Payload]}}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(pickle.UnpicklingError, match=re.escape("under `args.a[1]` that needs `tests.checkpoint")):
        load(tmp_path / "a", {"args": {}}, **WITH)
    state: dict[str, Any] = {"args": {}}
    load(tmp_path / "a", state, weights_only=False, **WITH)
    assert state["args"] == {"a": [1, Payload]}


# damage


def test_missing_and_shortened_data_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = data_folder(tmp_path / "a") / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 100)
    name = f"{file.parent.name}/{file.name}"
    text = (
        f"`{tmp_path}/a` can't be read as a checkpoint. It is damaged or incomplete: `{name}` has {size - 100} bytes of"
        f" {size}."
    )
    net = Net(seed=2)
    with pytest.raises(ValueError, match=texts(text)):
        load(tmp_path / "a", {"net": net}, **WITH)
    (tmp_path / "b" / name).unlink()
    text = f"`{tmp_path}/b` can't be read as a checkpoint. It is damaged or incomplete: `{name}` is missing."
    with pytest.raises(ValueError, match=texts(text)):
        load(tmp_path / "b", {"net": net}, **WITH)
    assert same(net.state_dict(), Net(seed=2).state_dict())


def test_metadata_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    saved(tmp_path / "a")
    file = tmp_path / "a" / ".metadata"
    whole = file.read_bytes()
    start = re.escape(f"`{tmp_path}/a` can't be read as a checkpoint. Its `.metadata` is damaged")
    for content in (b"", b"text", whole[: len(whole) // 2], pickle.dumps({"a": 1})):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=start):
            loaded(tmp_path / "a")
    file.write_bytes(whole)

    def change(edit: Any) -> str:
        metadata = FileSystemReader(tmp_path / "a").read_metadata()
        edit(metadata, metadata.state_dict_metadata["net.up.weight"])
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=start) as error:
            loaded(tmp_path / "a")
        file.write_bytes(whole)
        return str(error.value).rpartition("(")[2]

    def move(metadata: Any, item: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../b"

    assert change(lambda metadata, item: item.chunks.clear()) == "`net.up.weight` is not all there)."
    assert change(lambda metadata, item: metadata.storage_data.clear()) != ""
    assert change(move) == "`../b` is outside of the folder)."


def test_load_raw_of_several_objects_lists_what_is_missing(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    with pytest.raises(RuntimeError, match="missing     obj: weight"):
        load_raw(tmp_path / "a", nn.Linear(2, 2), **WITH)


class Shelf(CheckpointIO):
    """A plugin with paths that nobody else understands."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept[path] = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
        return self.kept[path]

    def remove_checkpoint(self, path: Any) -> None:
        del self.kept[path]


def test_a_plugin_with_paths_of_its_own_is_asked_for_files() -> None:
    options: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": Shelf()}
    save("shelf://a", {"step": 3}, **options)
    assert load("shelf://a", **options) == {"step": 3}


def test_a_file_is_mapped_where_only_a_part_is_needed(tmp_path: Path) -> None:
    io, path = TorchCheckpointIO(), str(tmp_path / "a.pt")
    io.save_checkpoint({"w": torch.ones(3)}, path)
    read, mapped = io.load_checkpoint(path), io.map_checkpoint(path)
    with open(path, "r+b") as file:
        file.seek(file.read().index(torch.ones(3).numpy().tobytes()))
        file.write(torch.zeros(3).numpy().tobytes())
    assert (read["w"].sum(), mapped["w"].sum()) == (3, 0)  # what is mapped is read when it is used
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(io.map_checkpoint(path)["w"], torch.ones(3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: torch.ones(1), "1": torch.zeros(1)}, "two values would have the key `value.1` in the folder"),
        (torch.eye(2).to_sparse(), "`value` is a sparse_coo tensor"),
    ],
)
def test_what_a_folder_can_not_hold_is_not_lost_in_silence(value: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        save(tmp_path / "a", {"value": value}, **WITH)


def test_a_folder_of_before_pytorch_2_4(tmp_path: Path) -> None:
    """Its metadata name the properties of tensors by another place."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    saved(tmp_path / "a")
    marker = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(marker.read_bytes())
    for item in metadata.state_dict_metadata.values():
        if hasattr(item, "properties"):
            item.properties = TensorProperties(dtype=item.properties.dtype)
    del metadata.version
    marker.write_bytes(pickle.dumps(metadata))
    assert same(loaded(tmp_path / "a"), expected())
