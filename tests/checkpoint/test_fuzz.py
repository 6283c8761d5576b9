# SPDX-License-Identifier: Apache-2.0
"""Whatever is damaged in a checkpoint: it is an error that names the file, and nothing of the user's was changed."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from fabric.cli import main
from tests.checkpoint.damage import WRITERS, check, copied, copy_of, damage, equal
from tests.checkpoint.sharded import make, train
from tests.ranks import RankContext, run_ranks

pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch's, about pickles that make no sense

CASES = 16  # of each layout
BY_RANKS = 16


@pytest.fixture(scope="module")
def whole_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for layout, write in WRITERS.items():
        write(folder / layout)
    return folder


@pytest.mark.parametrize("layout", WRITERS)
def test_damage_is_an_error_that_names_the_file_and_changes_nothing(
    layout: str, whole_ones: Path, tmp_path: Path
) -> None:
    target = tmp_path / "damaged" / "a"
    assert check(copy_of(whole_ones / layout, target), layout) == "loaded"
    outcomes = []
    for seed in range(CASES):
        how = damage(copy_of(whole_ones / layout, target), random.Random(seed))
        try:
            outcomes.append(check(target, layout))
        except BaseException as error:
            error.add_note(f"seed {seed}: {how}")
            raise
    assert len(outcomes) - outcomes.count("loaded") > CASES / 3


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_the_commands_tell_it_in_one_line(
    command: str, whole_ones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "damaged" / "a"
    codes = []
    for seed in range(2 * len(WRITERS)):
        layout = list(WRITERS)[seed % len(WRITERS)]
        how = damage(copy_of(whole_ones / layout, target), random.Random(1000 + seed))
        path = target / "step-00000002.ckpt" if layout == "kept" else target
        more = [] if command == "inspect" else [str(tmp_path / "out.pt"), "--force"]
        codes.append(main([command, str(path), *more]))
        said = capsys.readouterr().err
        if codes[-1]:
            assert codes[-1] == 1
            assert re.fullmatch(rf"fabric {command}: .*{re.escape(str(target))}.*\n", said), (
                f"seed {seed}, {how}: {said}"
            )
            assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith((".out", "..out"))]
    assert codes.count(1) > len(codes) / 3


def _save(context: RankContext, path: str, type: str) -> None:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=1, type=type)
    train(net, optimizer, 0)
    fabric.save(path, {"net": net, "optimizer": optimizer, "step": 1})


def _load_damaged(context: RankContext, source: str, target: str, seeds: range) -> list[tuple[str, str, bool]]:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=2)
    train(net, optimizer, 50)
    outcomes = []
    for seed in seeds:
        if fabric.global_rank == 0:
            damage(copy_of(Path(source), Path(target)), random.Random(seed))
        fabric.barrier()
        state = {"net": net, "optimizer": optimizer, "step": 0}
        before = _parts(state)
        try:
            fabric.load(target, state)
        except (ValueError, OSError, RuntimeError) as error:
            outcomes.append((type(error).__name__, str(error), equal(_parts(state), before)))
        else:
            outcomes.append(("", "", True))
        fabric.barrier()
    return outcomes


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """This rank's."""
    net, optimizer = state["net"], state["optimizer"]
    named = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [value for p in named for _, value in sorted(optimizer.state[p].items())] + list(
        net.state_dict().values()
    )
    tensors = [v.to_local() if hasattr(v, "to_local") else v for v in entries]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copied({"tensors": [t.detach() for t in tensors], "groups": groups, "step": state["step"]})


@pytest.mark.ranks
@pytest.mark.parametrize("type", ["full", "sharded"])
def test_two_ranks_say_the_same_whichever_sees_it(type: str, tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "a"), type)
    target = tmp_path / "damaged" / "a"
    first, second = run_ranks(2, _load_damaged, str(tmp_path / "a"), str(target), range(BY_RANKS))
    assert first == second
    refused = [(text, unchanged) for name, text, unchanged in first if name]
    assert all(str(target) in text and unchanged for text, unchanged in refused)
    assert len(refused) > BY_RANKS / 3


def _load_with_one_bad_part(context: RankContext, path: str) -> tuple[str, bool]:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=2)
    train(net, optimizer, 50)
    state = {"net": net, "optimizer": optimizer, "step": 0}
    before = _parts(state)
    with pytest.raises(ValueError, match="is damaged or incomplete") as caught:
        fabric.load(path, state)
    return str(caught.value), equal(_parts(state), before)


@pytest.mark.ranks
def test_a_part_that_one_rank_alone_reads(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "a"), "sharded")
    (file,) = (tmp_path / "a").glob("data-*/__1_0.distcp")
    data = file.read_bytes()
    for name in (b"_rebuild_tensor_v2", b"PK\1\2"):
        at = data.rindex(name)
        file.write_bytes(data[:at] + b"?" + data[at + 1 :])
        outcomes = run_ranks(2, _load_with_one_bad_part, str(tmp_path / "a"))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][1]
        assert "__1_0.distcp" in outcomes[0][0]
