"""EAGLE-3 by the trainer of speculators 0.9.0, on the very tokens that a run of ours trains on.

    python benchmarks/speculators_trainer.py tokens FILE KEY=VALUE ...   # as `train KEY=VALUE ...`
    SPECULATORS/bin/python benchmarks/speculators_trainer.py train FILE OUT DIR -- --lr 1e-3
    python -m drafttrain evaluate drafter.path=OUT/0 model.path=DIR      # one loop measures both

DIR is the target. `train` needs an environment of its own (torch 2.13.0, speculators 0.9.0, not
torchvision or torchaudio, which are built for CUDA). It is their trainer, loader, model, loss and
optimizer, set by their flags after `--`, but for what a CPU lacks: the losses are the eager ones,
attention is sdpa, hidden states come from Transformers and lie in memory. Nothing is accumulated
there: --total-seq-len is the size of a step, in tokens. It prints the CPU seconds that it took.
"""

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch


def write_tokens(file: Path, overrides: list[str]) -> None:
    """Write the conversations, and which of their tokens are trained on, of one run of ours."""
    from drafttrain.commands.setup.training import gather
    from drafttrain.config.compose import compose, typed
    from drafttrain.config.sections import TrainConfig
    from drafttrain.runtime.hardware import choose_device, choose_train_dtype
    from drafttrain.runtime.ranks import join_ranks

    config = typed(compose("train", overrides), TrainConfig)
    ranks = join_ranks(choose_device(config.hardware))
    dtype = choose_train_dtype(config.hardware, ranks.device)
    samples = gather(config, True, dtype, ranks, print).samples
    torch.save([(sample.tokens, sample.loss_mask) for sample in samples], file)
    print(f"{sum(len(sample.tokens) for sample in samples):,} tokens in {file}")


def read_features(target: Path, conversations: list[Any], layers: list[int]) -> list[Any]:
    """Return each conversation as their data set has it, in bfloat16, which is their default."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).model.eval()
    before_norm = []
    model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    rows = []
    for tokens, mask in conversations:
        before_norm.clear()
        with torch.no_grad():
            states = model(input_ids=tokens[None], output_hidden_states=True).hidden_states
        rows.append(
            {
                "hidden_states": torch.cat([states[layer][0] for layer in layers], dim=-1),
                "input_ids": tokens,
                "verifier_last_hidden_states": before_norm[0][0],
                "loss_mask": mask,
            }
        )
    return rows


def train(told: argparse.Namespace) -> None:
    """Train by their Trainer for one epoch, and print what it took."""
    from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig
    from speculators.train.data import BaseDataset
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.trainer import Trainer, TrainerConfig
    from speculators.train.vocab_mapping import get_target_vocab_size

    class InMemory(BaseDataset):
        def __init__(self, rows: list[Any]) -> None:
            self.rows = rows
            super().__init__(args["total_seq_len"])

        def __len__(self) -> int:
            return len(self.rows)

        def _compute_approx_lengths(self) -> list[int]:
            return [len(row["input_ids"]) for row in self.rows]

        def _get_raw_data(self, index: int) -> Any:
            return dict(self.rows[index])

    class OnCpu(Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.local_rank, self.device_type = torch.device("cpu"), "cpu"

    torch.accelerator.synchronize = lambda: None  # their timer asks for it, and there is none
    cpu = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
    own = ["--verifier-name-or-path", str(told.target), "--save-path", str(told.out)]
    args = TrainConfig.resolve([*cpu, *own, "--epochs", "1", *told.flags]).flatten()
    set_seed(args["seed"])
    vocab_size = get_target_vocab_size(None, str(told.target))
    model = build_draft_model(argparse.Namespace(**args), Eagle3DraftModel, None, None, vocab_size)
    args["draft_vocab_size"] = vocab_size
    conversations = torch.load(told.tokens, weights_only=True)
    begun = cpu_seconds()
    rows = read_features(told.target, conversations, model.target_layer_ids)
    features = cpu_seconds() - begun
    loader = _setup_dataloader(
        InMemory(rows),
        args["total_seq_len"],
        model.hidden_size,
        num_workers=0,
        preprocess=shift_batch,
        seed=args["seed"],
    )
    calls, _ = Eagle3DraftModel.get_trainer_kwargs(**args)
    given = {key: args[key] for key in TrainerConfig._fields if key in args}
    given |= {"num_epochs": args["epochs"], "train_call_kwargs": calls, "log_freq": 50}
    given |= {"hidden_states_dtype": getattr(torch, args["hidden_states_dtype"])}
    config = TrainerConfig(**given)
    begun = cpu_seconds()
    OnCpu(model, config, loader).run_training()
    record = {
        "flags": told.flags,
        "steps": len(loader),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "features_cpu_s": round(features, 1),
        "training_cpu_s": round(cpu_seconds() - begun, 1),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    (told.out / "cost.json").write_text(json.dumps(record) + "\n")
    print(json.dumps(record))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens")
    tokens.add_argument("file", type=Path)
    tokens.add_argument("overrides", nargs="*")
    trained = commands.add_parser("train")
    trained.add_argument("tokens", type=Path)
    trained.add_argument("out", type=Path)
    trained.add_argument("target", type=Path)
    trained.add_argument("flags", nargs="*", help="of `speculators train`, after --")
    told = parser.parse_args()
    if told.command == "tokens":
        write_tokens(told.file, told.overrides)
    else:
        train(told)


if __name__ == "__main__":
    main()
