# SPDX-License-Identifier: Apache-2.0
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, ReLU, Sequential

from fabric import Fabric
from fabric.loggers import TensorBoardLogger
from fabric.loggers.null import NullExperiment
from tests.ranks import RankContext, run_ranks

pytest.importorskip("tensorboard")
pytestmark = [
    pytest.mark.tensorboard,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard"),
]


def events(folder: Path | str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path | str, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_scalars_and_charts_of_several_lines(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="gpt", prefix="train")
    logger.log_metrics({"loss": torch.tensor(0.5), "by_split": {"a": 1, "b": torch.tensor(2.0)}}, step=3)
    logger.log_metrics({"loss": 0.25})
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "gpt/version_0")
    assert (logger.name, logger.version, logger.root_dir) == ("gpt", 0, str(tmp_path))
    assert scalars(logger.log_dir, "train-loss") == [(3, 0.5), (4, 0.25)]
    assert scalars(f"{logger.log_dir}/train-by_split_a", "train-by_split") == [(3, 1.0)]
    assert scalars(f"{logger.log_dir}/train-by_split_b", "train-by_split") == [(3, 2.0)]


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        TensorBoardLogger(tmp_path).log_metrics({"by_split": {"a": "high"}})
    assert str(error.value) == (
        "`TensorBoardLogger.log_metrics` got a `str` for `by_split/a`, which is not a number."
        " Write `log_text` for a text, `log_histogram` for an array."
    )
    assert os.listdir(tmp_path) == []


def test_versions_count_up_and_one_that_exists_is_continued(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path, name="", sub_dir="train")
    first.log_metrics({"loss": 1.0}, step=0)
    first.finalize("success")
    again = TensorBoardLogger(tmp_path, name=None, version=0, sub_dir="train")
    again.log_metrics({"loss": 2.0}, step=1)
    again.finalize("success")
    again.log_metrics({"loss": 3.0}, step=2)  # after the end it goes on
    copy = pickle.loads(pickle.dumps(again))
    again.finalize("success")
    copy.log_metrics({"loss": 4.0}, step=3)
    copy.finalize("success")
    assert scalars(tmp_path / "version_0/train", "loss") == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    assert TensorBoardLogger(tmp_path, name="").version == 1


def test_histograms_texts_and_images(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="v")
    logger.log_histogram("weights", torch.arange(4, dtype=torch.bfloat16, requires_grad=True), step=1)
    logger.log_text("sample", "to be or not", step=2)
    logger.log_image("digit", torch.zeros(1, 4, 4), step=3)
    logger.log_image("digits", torch.zeros(2, 1, 4, 4), step=3, dataformats="NCHW")
    logger.save()
    written = events(tmp_path / "v")
    (histogram,) = written.Histograms("weights")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (1, 4.0, 6.0)
    (text,) = written.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"to be or not")
    assert [(image.step, image.width) for image in written.Images("digit")] == [(3, 4)]
    assert len(written.Images("digits")) == 1
    logger.finalize("success")


def test_figures(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    logger = TensorBoardLogger(tmp_path, name="", version="v")
    figure = figures.Figure()
    logger.log_figure("curve", figure, step=1)
    logger.finalize("success")
    assert len(events(tmp_path / "v").Images("curve")) == 1


def test_hyperparameters_with_their_results(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoardLogger(tmp_path, name="", version="v")
    params = {"optimizer": {"lr": torch.tensor(0.5)}, "layers": 2, "path": Path("x"), "bias": True, "seed": None}
    logger.log_hyperparams(params, metrics={"best": 0.0})
    logger.log_metrics({"best": 0.75}, step=9)
    logger.finalize("success")
    content = events(tmp_path / "v").summary_metadata
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"].plugin_data.content)
    written = {
        name: getattr(value, value.WhichOneof("kind")) for name, value in start.session_start_info.hparams.items()
    }
    assert written == {"optimizer/lr": 0.5, "layers": 2.0, "path": "x", "bias": True, "seed": "None"}
    experiment = HParamsPluginData.FromString(content["_hparams_/experiment"].plugin_data.content).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["best"]
    assert scalars(tmp_path / "v", "best") == [(0, 0.0), (9, 0.75)]


@pytest.mark.parametrize(
    ("settings", "metrics", "expected"),
    [
        ({}, (), {"hp_metric": -1.0}),
        ({}, (0.5,), {"hp_metric": 0.5}),
        ({"default_hp_metric": False}, (), {}),
        ({"prefix": "train"}, ({"best": 0.5},), {"train-best": 0.5}),
    ],
)
def test_what_stands_as_the_result_of_hyperparameters(
    tmp_path: Path, settings: dict[str, Any], metrics: tuple[Any, ...], expected: dict[str, float]
) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="v", **settings)
    logger.log_hyperparams({"lr": 0.5}, *metrics)
    logger.finalize("success")
    written = events(tmp_path / "v")
    assert "_hparams_/session_start_info" in written.summary_metadata
    assert {tag: written.Scalars(tag)[0].value for tag in written.Tags()["scalars"]} == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_graph_is_that_of_the_users_module(tmp_path: Path, precision: str) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="v")
    fabric = Fabric(accelerator="cpu", precision=precision, loggers=logger)
    model = fabric.setup(Sequential(Linear(2, 3), ReLU()))
    model.train()
    fabric.logger.log_graph(model, torch.ones(1, 2))
    logger.finalize("success")
    graph = events(tmp_path / "v").Graph()
    names = {node.name for node in graph.node}
    assert any(name.startswith("Sequential/Linear[0]/") for name in names)
    assert not any("Fabric" in name for name in names)
    assert model.training


class WithExample(Module):
    example_input_array = torch.ones(1, 2), torch.ones(1, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right


def test_a_graph_needs_an_example(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="v")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        logger.log_graph(Linear(2, 3))
    assert str(error.value) == (
        "`log_graph(model)` runs the model once and needs an example input."
        " Write `log_graph(model, input_array=batch)`."
    )
    logger.log_graph(WithExample())
    logger.finalize("success")
    assert "aten::add" in {node.op for node in events(tmp_path / "v").Graph().node}


def test_a_url_makes_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.chdir(tmp_path)
    logger = TensorBoardLogger("memory://bucket/tb", name="gpt", sub_dir="a")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    assert logger.log_dir == "memory://bucket/tb/gpt/version_0/a"
    assert TensorBoardLogger("memory://bucket/tb", name="gpt").version == 1
    filesystem = fsspec.filesystem("memory")
    (file,) = filesystem.ls("/bucket/tb/gpt/version_0/a", detail=False)
    (tmp_path / "events.out.tfevents.1").write_bytes(filesystem.cat(file))
    logger.finalize("success")
    filesystem.rm("/bucket", recursive=True)
    assert scalars(tmp_path, "loss") == [(1, 1.0)]
    assert os.listdir(tmp_path) == ["events.out.tfevents.1"]


def test_a_url_of_no_file_system_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`nosuch://a` has a protocol that fsspec does not know"):
        TensorBoardLogger("nosuch://a", version=0)


def test_a_file_url_is_the_local_disk(tmp_path: Path) -> None:
    logger = TensorBoardLogger(f"file://{tmp_path}/logs", name="")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize("success")
    assert scalars(tmp_path / "logs/version_0", "loss") == [(1, 1.0)]


ENDS = """
import sys
from fabric.loggers import TensorBoardLogger
logger = TensorBoardLogger(sys.argv[1], name="", version="v", max_queue=1000)
for step in range(500):
    logger.log_metrics({"loss": 1.0}, step=step)
raise RuntimeError("the loop failed")
"""


def test_events_are_on_disk_though_nobody_finalizes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    ended = subprocess.run(command, timeout=120, stderr=subprocess.PIPE, text=True)
    assert ended.stderr.endswith("RuntimeError: the loop failed\n")
    assert len(scalars(tmp_path / "v", "loss")) == 500


def log_on_two_ranks(context: RankContext) -> tuple[str, list[str]]:
    logger = TensorBoardLogger(context.directory / "logs", name="", version="v")
    fabric = context.fabric(loggers=logger)
    fabric.log("loss", float(fabric.global_rank), step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_graph(Linear(1, 1), torch.ones(1, 1))
    logger.experiment.add_text("anything", "goes")
    kind = type(logger.experiment).__name__
    logger.finalize("success")
    fabric.barrier()
    found = [f"{e.step} {e.value}" for e in events(context.directory / "logs/v").Scalars("loss")]
    return kind, [*found, str(len(os.listdir(context.directory / "logs/v")))]


@pytest.mark.ranks
def test_only_rank_zero_writes() -> None:
    zero, one = run_ranks(2, log_on_two_ranks)
    assert zero == ("SummaryWriter", ["1 0.0", "1"])
    assert one == (NullExperiment.__name__, ["1 0.0", "1"])
