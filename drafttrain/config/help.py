"""What `--help` prints, read from conf/: the yaml's own comments are the documentation."""

import textwrap
from dataclasses import fields
from pathlib import Path

from drafttrain.config.groups import (
    bases,
    choices,
    command_groups,
    conf_dir,
    file_of,
    own_groups,
    read_choice,
)
from drafttrain.config.overrides import SAVED
from drafttrain.config.sections import COMMANDS

# The keys that most people change, most wanted first; `--help SECTION` shows every one.
MOST_USED = {
    command: keys.split()
    for command, keys in {
        "train": "run.name run.resume model.path data.holdout trainer.max_steps "
        "trainer.tokens_per_step trainer.lr hardware.device hardware.ranks hardware.micro_batch",
        "evaluate": "run.dir eval.prompts eval.prompts_per_task eval.depth eval.temperature "
        "eval.max_new_tokens hardware.device",
        "compare": "compare.runs compare.evaluation compare.baseline compare.all_pairs compare.dir",
        "tune": "run.dir tune.depths tune.batch_sizes tune.measure eval.prompts_per_task",
        "chat": "run.dir chat.system chat.max_new_tokens chat.marks eval.temperature "
        "eval.depth eval.policy",
        "generate": "run.dir chat.prompt chat.file chat.out eval.temperature "
        "eval.depth chat.max_new_tokens",
        "regenerate": "data.path regenerate.out regenerate.backend regenerate.base_url "
        "regenerate.temperature regenerate.max_new_tokens regenerate.turns",
        "export": "run.dir export.dir export.dtype export.push export.dry_run",
        "capture": "store.dir store.drafters store.layers store.dtype store.shard_mb "
        "store.assistant_only store.verify hardware.micro_batch",
        "plan": "plan.dir plan.run plan.measured plan.acceptance_length plan.price_per_hour "
        "plan.batch_sizes hardware.micro_batch hardware.accelerator trainer.max_steps",
    }.items()
}
EXAMPLES = {
    "train": (
        "train run.name=demo",
        "train model=llama8b drafter=eagle model.path=/models/Llama-3.1-8B-Instruct",
        "train data=jsonl data.path=conversations.jsonl trainer.max_steps=2000",
        "train deepspeed=zero2 tracker=wandb",
        "train features=stored features.dir=outputs/store drafter=medusa",
    ),
    "evaluate": (
        "evaluate run.dir=outputs/demo",
        "evaluate run.dir=outputs/demo eval.depth=6 eval.temperature=0.7",
        "evaluate run.dir=outputs/demo hardware=cpu eval.prompts=prompts.jsonl",
    ),
    "compare": (
        "compare 'runs=[outputs/a,outputs/b]'",
        "compare 'runs=[outputs/a,outputs/b,outputs/c]' compare.baseline=ngram tracker=wandb",
    ),
    "tune": (
        "tune run.dir=outputs/demo",
        "tune run.dir=outputs/demo 'tune.batch_sizes=[1,16]' tune.measure=false",
    ),
    "chat": (
        "chat run.dir=outputs/demo",
        "chat run.dir=outputs/demo eval.temperature=0.7 'chat.system=Answer in rhymes.'",
        "chat drafter=ngram model=tiny",
    ),
    "generate": (
        "generate run.dir=outputs/demo 'chat.prompt=Why is the sky blue?'",
        "generate run.dir=outputs/demo chat.file=prompts.txt chat.out=answers.jsonl",
    ),
    "regenerate": (
        "regenerate data.path=prompts.jsonl regenerate.out=answers.jsonl",
        "regenerate data.path=chats.jsonl regenerate.backend=vllm regenerate.temperature=0.7",
        "regenerate data.path=chats.jsonl regenerate.backend=openai "
        "regenerate.base_url=http://localhost:8000/v1",
    ),
    "export": (
        "export run.dir=outputs/demo export=vllm export.dir=outputs/demo/vllm",
        "export run.dir=outputs/demo export.push=ada/tiny-eagle3 export.dry_run=true",
    ),
    "capture": (
        "capture store.dir=outputs/store 'store.drafters=[eagle3,medusa]'",
        "capture store.dir=outputs/store store.dtype=float8 data=jsonl data.path=talk.jsonl",
        "capture store.dir=outputs/store store.verify=true",
    ),
    "plan": (
        "plan model=llama70b drafter=eagle3 hardware=h100x8",
        "plan model=llama8b hardware=h100x1 deepspeed=zero2 plan.price_per_hour=2.2",
        "plan run.dir=outputs/demo hardware=h100x1",
    ),
}
# What a command does, beyond its headline.
ABOUT = {
    "train": """\
Data is a file of conversations ({messages: [{role, content}, ...]}, the spellings of
`conversations` and ShareGPT too), a data set of the Hub, or nothing: with data=selfgen the target
writes it. The loss covers the assistant's tokens only. A line that cannot be used is counted and
named.

Losses do not depend on the micro batch, the ranks or the engine. Logits of a whole batch are never
held: losses and their gradients are computed in chunks of positions. hardware.target_placement
sets where the target lives: whole on each device, spread by accelerate, partitioned by ZeRO-3, or
in vLLM. deepspeed= shards the drafter's optimizer, or puts it on the host.

A run may be killed at any instant: on a CPU run.resume=true ends bit for bit where an undisturbed
run ends. SIGTERM and SIGUSR1 save the current step. A damaged checkpoint is an error that names
its file; run.skip_damaged=true takes the newest whole one. run.init_from=DIR starts from a
run, or from what engines serve (a directory, or owner/name of the Hub), on new data or for a
changed target; its report shows acceptance before and after.""",
    "evaluate": """\
drafter.path=DIR (or owner/name of the Hub) measures what others trained: in the layouts of vLLM,
speculators, SafeAILab and FasterDecoding, and any causal model of Transformers. It names what it
recognised, and everything that does not fit, before decoding. drafter=ngram is prompt lookup;
drafter=two_model drafter.path=DIR is any smaller model, of the same vocabulary or by token
intersection. run.dir=DIR drafter=ensemble joins a run's drafter with prompt lookup, which drafts
alone where it is enough; 'drafter.members=[outputs/a,outputs/b]' lets others draft one tree.

The report has a verdict for each task with the speedup, money at eval.price_per_hour and the extra
memory; acceptance length and acceptance per position; tokens per second with and without the
drafter; 95 % intervals by bootstrap over prompts, paired with the plain loop of the same process;
prompt lookup next to it; and whether greedy output was identical, token for token, in float32
where that fits.
eval.certify=true adds a certificate, which goes into the model card too. Every row of a batch
(eval.batch_size) gets the tokens of batch 1, sampled or greedy.

model.inflate=0.5B gives target and drafter the cost of a larger model: the same text and
acceptance, labelled in every report. eval.engine=vllm decodes the same prompts with a real vLLM in
an environment of its own (eval.vllm_python or DRAFTTRAIN_VLLM_PYTHON), and names every output
whose counters differ.""",
    "compare": """\
Rows are paired by prompt, and so are the intervals of their differences; seeds of one setting are
grouped. Runs must have been evaluated on the same prompts.""",
    "tune": """\
It times passes of target and drafter on this machine, predicts the speedup of every depth and
batch size, measures it as well, and writes the choice to the run's tuned.json, where
eval.depth=auto and export.num_speculative_tokens=auto find it. With eval.policy=optimal_tree it
makes the fastest tree of each depth first.""",
    "chat": """\
Text comes as it is verified; what was drafted and accepted is bold and green, what the target wrote
itself is plain. Under it stand the tokens, tokens per second, tokens per pass of the target, and
how much faster that is than plain decoding, which is timed once, on the first prompt. /new begins a
new conversation, /system TEXT sets the system's turn, /exit or Ctrl-D ends; Ctrl-C stops an answer.
In a pipe each line is a turn, and only the answers are written.""",
    "generate": """\
Prompts are answered one by one and printed as they come, or written to chat.out with who wrote each
token. A finished answer in chat.out is not decoded again. For training data from many prompts use
`regenerate`, which batches.""",
    "regenerate": """\
Answers come from Transformers, from vLLM (regenerate.backend=vllm) or from any OpenAI-compatible
endpoint (regenerate.backend=openai). They are written row by row, and the same command resumes.
Bad answers are counted and named; one that was cut is trained without an end of turn.""",
    "export": """\
It writes the drafter as engines load it, checks names, shapes and completeness (engines do not),
loads its own output back and compares logits, and prints the commands that serve it.""",
    "capture": """\
Size and time are printed first. The same command resumes a killed capture; a damaged shard is
named, and it alone is written again. `train features=stored features.validate=false` then trains
without loading the target.""",
    "plan": """\
From yaml alone and offline: memory per GPU by component for every way to shard, features on disk,
hours, energy, money, and the largest batch at which the drafter pays off and its caches fit.
run.dir=outputs/NAME plans that run, with the acceptance length of its report.
plan.measured=outputs/NAME puts the efficiency of your own run in place of the guessed one. `train`
prints the short form, and refuses what cannot fit (hardware.check_fit).""",
}
CALL = "python -m drafttrain"
WIDTH = 100
COLUMN = 30  # where the explanations begin


def overview() -> str:
    """Return what `python -m drafttrain --help` prints."""
    commands = "\n".join(f"  {name:<12}{headline(primary(name))}" for name in COMMANDS)
    return f"""\
drafttrain: train, measure and serve the drafters of speculative decoding.

usage: {CALL} COMMAND [SECTION=CHOICE ...] [SECTION.KEY=VALUE ...]

{commands}

First steps, on any machine, without a GPU or a network:
  {CALL} train run.name=demo
  {CALL} evaluate run.dir=outputs/demo
  {CALL} export run.dir=outputs/demo export.dir=outputs/demo/vllm

With a target of your own, from the Hub or from a local directory:
  {CALL} train model=llama8b drafter=eagle3
  {CALL} train model=llama8b drafter=eagle3 model.path=/models/Llama-3.1-8B-Instruct

options:
  COMMAND --help            its sections, their choices, the keys most used
  COMMAND --help SECTION    every key of a section
  COMMAND --config          print the composed configuration instead of running (--cfg job)
  COMMAND --info defaults   print which files of conf/ are composed, and in which order
  COMMAND --multirun (-m)   one job for each combination of drafter=eagle3,medusa run.seed=0,1
  --config-dir FOLDER       a folder of yaml of your own, laid out like conf/
  --slurm[=KEY=VALUE,...]   print a batch script for `train` or `capture`, with options of sbatch
  --version

`train` and `capture` start a process for every GPU of this machine (hardware.ranks). On several
machines torchrun, DeepSpeed's launcher or SLURM starts them; they must share the disk of the run
folder.

status: 0 done; 2 the command line, or what it names, is invalid; 1 a failure of the machine, a
place held by another process, or an unexpected error; 143 a scheduler's signal; 130 Ctrl-C.
An unexpected error leaves its traceback in a file; DRAFTTRAIN_DEBUG=1 shows it."""


def command_help(command: str) -> str:
    """Return what `COMMAND --help` prints."""
    groups = command_groups(command)
    lines = [headline(primary(command)), ""]
    lines += [f"usage: {CALL} {command} [SECTION=CHOICE ...] [SECTION.KEY=VALUE ...]", ""]
    lines += [ABOUT[command], ""]
    lines += ["sections and their choices (* default):"]
    for section in (field.name for field in fields(COMMANDS[command])):
        files = sorted(choices(section).items())
        default = groups.get(section)
        if default == SAVED and files:
            others = ", ".join(name for name, _ in files)
            lines += _row(f"{section}=saved *", f"as run.dir was trained; or {others}")
        for name, file in files if default != SAVED else []:
            lines += _row(f"{section}={name}{' *' * (name == default)}", headline(file))
    if groups.get("drafter", SAVED) != SAVED:  # an experiment is of training
        for group in own_groups():
            lines += ["", f"{group}: values of several sections at once:"]
            for name, file in sorted(choices(group).items()):
                lines += _row(f"+{group}={name}", headline(file))
    lines += ["", f"keys most used (all keys of a section: {CALL} {command} --help SECTION):"]
    for key in MOST_USED[command]:
        comment, value = _find(command, key)
        lines += _row(f"{key}={value}", comment)
    lines += ["", "examples:", *(f"  {CALL} {example}" for example in EXAMPLES[command])]
    return "\n".join(lines)


def section_help(command: str, section: str, choice: str) -> str:
    """Return every key of a section as the choice sets it, with its comment."""
    files = choices(section)
    file = files.get(choice) or next(iter(files.values()), primary(command))
    prefix = "" if file == primary(command) else f"{section}."
    title = f"keys of {section}={file.stem}:" if prefix else f"keys of {section}:"
    lines = [headline(file), "", title]
    for key, (comment, value) in documented(file).items():
        lines += _row(f"{prefix}{key}={value}", comment)
    return "\n".join(lines)


def primary(command: str) -> Path:
    """Return the primary yaml of a command."""
    return conf_dir() / f"{command}.yaml"


def headline(file: Path) -> str:
    """Return the comment that opens a yaml file: what the choice is for."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):  # where Hydra puts its keys
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def documented(file: Path) -> dict[str, tuple[str, str]]:
    """Return (the comment above, the value as written) of every key, by its dotted name.

    The keys of the choices that it builds on come after its own, whose comments they may lack.
    Below the first level only keys with a comment count: DeepSpeed's own have none.
    """
    below: dict[str, tuple[str, str]] = {}
    group = "" if file.parent == conf_dir() else file.parent.name
    for base in bases(read_choice(file)):
        place = file_of(group, base)
        below |= documented(place) if place else {}
    found: dict[str, tuple[str, str]] = {}
    comment: list[str] = []
    parent = ""
    for line in file.read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
            continue
        key, colon, value = text.partition(":")
        nested = line.startswith(" ")
        if colon and not text.startswith("- ") and key not in ("_target_", "defaults"):
            if not nested:
                parent = key
            if comment or (value and not nested):
                name = f"{parent}.{key}" if nested else key
                described = " ".join(comment) or below.get(name, ("",))[0]
                found[name] = (described, value.strip())
        comment = []
    return found | {name: told for name, told in below.items() if name not in found}


def _find(command: str, key: str) -> tuple[str, str]:
    here = documented(primary(command))
    if key in here:
        return here[key]
    section, _, name = key.partition(".")
    default = command_groups(command)[section]
    files = choices(section)
    file = files.get(default) or files["auto" if section == "hardware" else next(iter(files))]
    return documented(file)[name]


def _row(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, width=WIDTH - COLUMN) or [""]
    head = f"  {name}"
    first = [head] if len(name) + 4 > COLUMN else [head.ljust(COLUMN) + lines.pop(0)]
    return [*first, *(" " * COLUMN + line for line in lines)]
